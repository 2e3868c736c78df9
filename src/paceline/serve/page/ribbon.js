// The ribbon: the text as tokens, with its rounds and its rejected drafts. Blocks out of view are not drawn by the browser.
import { make, visible } from "./dom.js";
import { followers, rejectedAt } from "./reducer.js";
/** @typedef {import("./types.js").Run} Run */
/** @typedef {import("./types.js").Round} Round */

const BLOCK = 40; // rounds
const LINE = 14; // pixels: less than between two lines
const BRANCHES = 3; // ghosts shown above a token

export class Ribbon {
  /** @param {HTMLElement} box @param {(token: number | null) => void} point */
  constructor(box, point) {
    this.box = box;
    this.point = point;
    /** @type {Run | null} */ this.run = null;
    /** @type {HTMLElement[]} */ this.tokens = [];
    this.rounds = 0;
    /** @type {HTMLElement | null} */ this.block = null;
    this.inBlock = 0;
    this.width = 0;
    /** @type {HTMLElement | null} */ this.active = null;
    this.follows = true;
    box.addEventListener("pointerover", (event) => this.over(event.target));
    box.addEventListener("click", (event) => this.over(event.target));
    box.addEventListener("keydown", (event) => this.press(event));
    box.addEventListener("scroll", () => {
      this.follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
    }, { passive: true });
  }

  /** Show a run, from its beginning. @param {Run | null} run */
  show(run) {
    if (run === this.run && this.width === this.box.clientWidth) return;
    this.run = run;
    this.width = this.box.clientWidth;
    this.box.replaceChildren();
    this.tokens = [];
    this.rounds = this.inBlock = 0;
    this.block = null;
    this.active = null;
    this.follows = true;
    this.update();
  }

  /** Draw the rounds that came since the last call. */
  update() {
    const run = this.run;
    if (!run) return;
    const known = this.tokens.length;
    for (; this.rounds < run.rounds.length; this.rounds++) this.add(run, run.rounds[this.rounds]);
    if (known === this.tokens.length) this.mend(run); // the end of a text can belong to a token that was drawn
    else if (this.follows && run.status === "running") this.box.scrollTop = this.box.scrollHeight;
  }

  /** @param {Run} run */
  mend(run) {
    const last = this.tokens.length - 1, drawn = this.tokens[last];
    if (drawn && drawn.textContent !== run.tokens[last].text) drawn.textContent = run.tokens[last].text;
  }

  /** @param {Run} run @param {Round} round */
  add(run, round) {
    if (!this.block || this.inBlock >= BLOCK) this.begin();
    const box = make("span", "round"), index = this.rounds;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `Round ${index + 1}`);
    while (this.tokens.length < run.tokens.length && run.tokens[this.tokens.length].round === index) {
      const number = this.tokens.length, token = run.tokens[number];
      const drawn = make("span", `token ${token.kind}${round.bonus && token.kind === "own" ? " bonus" : ""}`, token.text);
      drawn.setAttribute("role", "option");
      drawn.setAttribute("aria-selected", "false");
      drawn.dataset.at = String(number);
      const ghosts = rejectedAt(round, token.place);
      if (ghosts.length) box.append(column(run, round, ghosts, drawn));
      else box.append(drawn);
      const lines = token.text.split("\n").length - 1;
      if (lines) {
        drawn.classList.add("newline");
        for (let line = 0; line < lines; line++) box.append(document.createElement("br"));
      }
      if (token.text === "") drawn.classList.add("silent");
      this.tokens.push(drawn);
    }
    const after = round.own === null ? rejectedAt(round, round.accepted.length) : [];
    if (after.length) box.append(column(run, round, after, null));
    this.block?.append(box);
    this.inBlock += 1;
  }

  /** Begin a block. The rounds of the last line go with it, so that the line is not broken. */
  begin() {
    const made = make("div", "block"), old = this.block;
    this.inBlock = 0;
    made.setAttribute("role", "presentation");
    if (old && old.lastElementChild instanceof HTMLElement) {
      const top = old.lastElementChild.offsetTop, first = old.firstElementChild;
      while (old.lastElementChild instanceof HTMLElement && old.lastElementChild !== first && Math.abs(old.lastElementChild.offsetTop - top) < LINE) {
        made.prepend(old.lastElementChild);
        this.inBlock += 1;
      }
      if (this.inBlock >= BLOCK) this.inBlock = 0;
    }
    this.box.append(made);
    this.block = made;
  }

  /** @param {EventTarget | null} target */
  over(target) {
    if (!(target instanceof Element)) return;
    const token = target.closest(".token, .ghosts");
    const at = token instanceof HTMLElement ? token.dataset.at : undefined;
    if (at !== undefined) this.go(Number(at), false);
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const run = this.run;
    if (!run || !this.tokens.length || event.ctrlKey || event.altKey || event.metaKey) return;
    const now = this.active ? Number(this.active.dataset.at) : -1;
    const next = step(run, now, event.key);
    if (next === null) return;
    event.preventDefault();
    this.go(next, true);
  }

  /** Make a token the active one. @param {number} at @param {boolean} scroll */
  go(at, scroll) {
    const drawn = this.tokens[at];
    if (!drawn || drawn === this.active) return;
    if (this.active) {
      this.active.setAttribute("aria-selected", "false");
      this.active.removeAttribute("id");
    }
    this.active = drawn;
    drawn.setAttribute("aria-selected", "true");
    drawn.id = "active-token";
    this.box.setAttribute("aria-activedescendant", "active-token");
    if (scroll) drawn.scrollIntoView({ block: "nearest" });
    this.point(at);
  }
}

/** @param {Run} run @param {number} now @param {string} key @returns {number | null} the token that a key goes to */
function step(run, now, key) {
  const last = run.tokens.length - 1;
  const round = now < 0 ? -1 : run.tokens[now].round;
  const first = (/** @type {number} */ wanted) => run.tokens.findIndex((token) => token.round === wanted);
  switch (key) {
    case "ArrowRight": return Math.min(last, now + 1);
    case "ArrowLeft": return Math.max(0, now - 1);
    case "ArrowDown": return round + 1 < run.rounds.length ? Math.max(0, first(round + 1)) : last;
    case "ArrowUp": return round > 0 ? Math.max(0, first(round - 1)) : 0;
    case "Home": return 0;
    case "End": return last;
    default: return null;
  }
}

/**
 * Return rejected drafts above the token that the target wrote there.
 * @param {Run} run @param {Round} round @param {number[]} ghosts @param {HTMLElement | null} token
 * @returns {HTMLElement}
 */
function column(run, round, ghosts, token) {
  const box = make("span", token ? "column" : "column tail"), above = make("span", "ghosts");
  above.setAttribute("aria-hidden", "true");
  if (token) above.dataset.at = token.dataset.at;
  if (ghosts.length > 1) above.classList.add("tree");
  for (const node of ghosts.slice(0, BRANCHES)) {
    const ghost = make("span", "ghost", visible(run.texts[round.drafted[node]] ?? "?").replace(/^␣/, ""));
    const more = followers(round, node);
    if (more) ghost.append(make("i", "", `+${more}`));
    above.append(ghost);
  }
  if (ghosts.length > BRANCHES) above.append(make("i", "", `and ${ghosts.length - BRANCHES}`));
  box.append(above);
  if (token) box.append(token);
  return box;
}
