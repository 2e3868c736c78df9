// What is known about one token: who wrote it, its round, the likeliest tokens, and the race for it.
import { call } from "./api.js";
import { make, shown, visible } from "./dom.js";
import { parentsOf } from "./reducer.js";
/** @typedef {import("./types.js").Run} Run */
/** @typedef {import("./types.js").Round} Round */
/** @typedef {import("./types.js").Share} Share */

/**
 * Show a token of a run.
 * @param {HTMLElement} box @param {Run} run @param {number} at
 */
export function showDetails(box, run, at) {
  const token = run.tokens[at], round = run.rounds[token.round];
  const title = make("h3", "", visible(token.text));
  const who = make("p", `who ${token.kind}`, told(token.kind, round));
  const list = make("dl");
  for (const [name, value] of facts(run, token.round)) list.append(make("dt", "", name), make("dd", "", value));
  box.replaceChildren(title, who, list);
  const likeliest = round.likeliest?.[token.place];
  if (likeliest) {
    box.append(make("h4", "", "The target's likeliest tokens"), shares(run, likeliest, token.id));
    const greedy = run.body.temperature === 0;
    if (greedy) box.append(make("p", "quiet", "Temperature 0: the likeliest token wins, without dice."));
    else race(box, run, likeliest, round.position + token.place, token.id);
  }
  if (round.drafted.length) box.append(make("h4", "", "The draft of this round"), tree(run, round));
}

/** @param {"drafted" | "own"} kind @param {Round} round */
function told(kind, round) {
  if (kind === "drafted") return "Drafted, and the target agreed.";
  if (!round.drafted.length) return "The target wrote it. Nothing was drafted.";
  if (round.bonus) return `The target's own, after ${round.parents ? "a branch" : "a draft"} that was all accepted.`;
  return "The target's own: the draft said something else here.";
}

/** @param {Run} run @param {number} index @returns {[string, string][]} */
function facts(run, index) {
  const round = run.rounds[index];
  /** @type {[string, string][]} */
  const found = [
    ["Round", `${index + 1} of ${run.rounds.length}`],
    ["Drafter", run.drafter],
    ["Drafted", `${round.drafted.length}, accepted ${round.accepted.length}`],
    ["Time", `${shown(1000 * round.seconds)} ms`],
  ];
  if (round.parts) found.push(["of it", `draft ${shown(1000 * round.parts.draft)} ms, forward pass ${shown(1000 * round.parts.forward)} ms`]);
  if (round.why) found.push(["Why", round.why]);
  return found;
}

/** @param {Run} run @param {Share[]} likeliest @param {number} chosen */
function shares(run, likeliest, chosen) {
  const list = make("ol", "shares");
  for (const [id, share] of likeliest) {
    const item = make("li", id === chosen ? "chosen" : ""), bar = make("span", "bar");
    bar.style.width = `${Math.max(1, 100 * share)}%`;
    item.append(make("span", "name", visible(run.texts[id] ?? `#${id}`)), bar, make("span", "share", percent(share)));
    list.append(item);
  }
  return list;
}

/** @param {number} share */
const percent = (share) => (share >= 0.001 ? `${shown(100 * share, 1)} %` : "<0.1 %");

/**
 * Add the race p/E of a sampled token.
 * @param {HTMLElement} box @param {Run} run @param {Share[]} likeliest @param {number} position @param {number} chosen
 */
async function race(box, run, likeliest, position, chosen) {
  const part = make("div"), tokens = likeliest.map(([id]) => id);
  part.append(make("h4", "", "The dice: p / E"));
  box.append(part);
  try {
    const answer = await call("/playground/noise", { body: { seed: run.body.seed, position, tokens } });
    const noise = (await answer.json()).noise;
    const ratios = likeliest.map(([, share], at) => share / noise[at]), most = Math.max(...ratios);
    const list = make("ol", "shares");
    likeliest.forEach(([id], at) => {
      const item = make("li", id === chosen ? "chosen" : ""), bar = make("span", "bar");
      bar.style.width = `${Math.max(1, (100 * ratios[at]) / most)}%`;
      item.append(make("span", "name", visible(run.texts[id] ?? `#${id}`)), bar, make("span", "share", shown(ratios[at])));
      item.title = `p ${shown(likeliest[at][1], 4)}, E ${shown(noise[at], 4)}`;
      list.append(item);
    });
    const won = likeliest[ratios.indexOf(most)][0] === chosen;
    part.append(list, make("p", "quiet", won
      ? `E follows from seed ${run.body.seed} and position ${position} only. The largest p / E wins. No drafter can change it.`
      : "Two tokens are closer than the probabilities shown here are exact."));
  } catch (error) {
    part.append(make("p", "quiet", error instanceof Error ? error.message : String(error)));
  }
}

/** @param {Run} run @param {Round} round */
function tree(run, round) {
  const parents = parentsOf(round), branching = round.parents !== null;
  /** @param {number} parent @returns {HTMLElement} */
  const under = (parent) => {
    const list = make("ul", "draft");
    parents.forEach((each, node) => {
      if (each !== parent) return;
      const kept = round.accepted.includes(node);
      const item = make("li", kept ? "kept" : "lost", `${kept ? "✓" : "✗"} ${visible(run.texts[round.drafted[node]] ?? "?")}`);
      if (branching && parents.includes(node)) item.append(under(node));
      list.append(item);
    });
    return list;
  };
  if (branching) return under(-1);
  const list = make("ul", "draft chain");
  round.drafted.forEach((id, node) => {
    const kept = round.accepted.includes(node);
    list.append(make("li", kept ? "kept" : "lost", `${kept ? "✓" : "✗"} ${visible(run.texts[id] ?? "?")}`));
  });
  return list;
}
