// The page: it connects the form, the state and the views.
import { ApiError, call, events, key, setKey } from "./api.js";
import { showDetails } from "./details.js";
import { area, button, element, fill, get, input, make, select, shown } from "./dom.js";
import { announce, comparable, race, table, times, whatIf } from "./experiments.js";
import * as past from "./history.js";
import { Operator } from "./operator.js";
import { begin, figures, reduce, runOf } from "./reducer.js";
import { Ribbon } from "./ribbon.js";
import * as form from "./settings.js";
/** @typedef {import("./types.js").Run} Run */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./types.js").Speculation} Speculation */

const TOP = 5; // likeliest tokens of a position
const THEME = "paceline.theme";

const state = begin();
const ribbon = new Ribbon(element("ribbon"), (token) => change({ kind: "point", token }));
const operator = new Operator((message) => problem(message));
/** @type {AbortController | null} */ let writing = null;
/** @type {AbortController | null} */ let replaying = null;
/** @type {(() => void) | null} */ let again = null;
/** @type {Message[]} */ let conversation = [];
/** @type {string} */ let entry = crypto.randomUUID();
let runs = 0, drawing = false;

// ---- state and drawing

/** @param {import("./reducer.js").Action} action */
function change(action) {
  reduce(state, action);
  if (!drawing) {
    drawing = true;
    requestAnimationFrame(redraw);
  }
}

let detailed = "", tabled = "";

function redraw() {
  drawing = false;
  const run = runOf(state, state.shown) ?? null;
  element("empty").hidden = run !== null;
  element("ribbon").hidden = run === null;
  ribbon.show(run);
  ribbon.update();
  if (!run) return;
  showFigures(run);
  const token = `${run.id}:${state.pointed}`;
  if (token !== detailed) {
    if (state.pointed !== null) showDetails(element("details"), run, state.pointed);
    else element("details").replaceChildren(make("p", "quiet", "Point at a token, or go to the text and use the arrow keys."));
  }
  detailed = token;
  const now = `${run.id}:${state.runs.map((each) => each.status).join()}`;
  if (now === tabled) return;
  tabled = now;
  showRun(run);
}

/** @param {Run} run */
function showFigures(run) {
  const { drafted, accepted, written, rounds, tau } = figures(run);
  const seconds = (run.milliseconds || performance.now() - (began.get(run.id) ?? performance.now())) / 1000;
  const parts = [`${written} tokens in ${rounds} rounds`, `τ ${shown(tau)}`, drafted ? `${accepted} of ${drafted} drafted tokens accepted` : "nothing drafted"];
  if (seconds > 0) parts.push(`${shown(written / seconds, 1)} tokens/s`);
  const details = run.usage?.prompt_tokens_details;
  if (details) parts.push(`cached ${details.cached_tokens} of ${run.usage.prompt_tokens} tokens of the prompt`);
  element("figures").textContent = parts.join(" · ");
}

/** Show what changes only when a run begins or ends. @param {Run} run */
function showRun(run) {
  table(state, (id) => change({ kind: "show", run: id }));
  const running = state.runs.some((each) => each.status === "running"), ended = run.status !== "running";
  element("dice-part").hidden = !state.runs.some((each) => each.status === "done");
  element("if-part").hidden = !(run.status === "done" && state.facts?.replays);
  if (ended) times(run);
  get("plain-part", HTMLElement).hidden = !ended;
  element("plain").textContent = run.text;
  button("stop-writing").disabled = !running;
  for (const id of ["go", "no-drafter", "worst-drafter", "other-drafter", "race"]) button(id).disabled = running;
}

/** @param {string} message @param {(() => void) | null} [retry] */
function problem(message, retry = null) {
  element("problem").hidden = false;
  element("problem-text").textContent = message;
  button("retry").hidden = retry === null;
  again = retry;
}

/** @param {string} message */
function say(message) {
  element("status").textContent = message;
}

// ---- runs

/** @type {Map<number, number>} */
const began = new Map();

/**
 * Write a text, and return its run when it has ended.
 * @param {{path: string, body: Record<string, any>}} asked @param {Speculation} speculation @param {boolean} likeliest
 * @param {() => void} retry what to do when the user tries again after a failure
 * @returns {Promise<Run>}
 */
async function write(asked, speculation, likeliest, retry) {
  const id = ++runs, control = (writing = new AbortController()), start = performance.now();
  const options = { include_rounds: true, include_usage: true, ...(likeliest ? { include_likeliest: TOP } : {}) };
  const drafter = { "": state.facts?.drafter ?? "", none: "none" }[speculation.method] ?? speculation.method;
  /** @type {Run} */
  const run = {
    id, title: nameOf(speculation), path: asked.path, body: { ...asked.body, ...form.speculative(speculation, state.facts), stream: true, stream_options: options },
    status: "running", tokens: [], rounds: [], arrivals: [], text: "", texts: {}, usage: null, finish: "", bytes: 0, milliseconds: 0, drafter,
  };
  began.set(id, start);
  element("problem").hidden = true;
  change({ kind: "run", run });
  say("Writing.");
  /** @type {Run["status"]} */ let status = "failed";
  try {
    const response = await call(asked.path, { body: run.body, signal: control.signal });
    for await (const { content, bytes } of events(response, control.signal)) {
      if (content.error) throw new ApiError(content.error.message, 500, true);
      const failure = content.choices?.[0]?.error;
      if (failure) throw new ApiError(failure, 500, true);
      change({ kind: "chunk", run: id, chunk: content, at: performance.now() - start, bytes });
    }
    status = "done";
  } catch (error) {
    if (control.signal.aborted) status = "cancelled";
    else failed(error, retry);
  } finally {
    if (writing === control) writing = null;
    change({ kind: "end", run: id, status, at: performance.now() - start });
    const { written, accepted } = figures(run);
    say({ done: `Done: ${written} tokens, ${accepted} of them drafted.`, cancelled: `Stopped after ${written} tokens.`, failed: "The text failed.", running: "" }[status]);
  }
  return run;
}

/** @param {unknown} error @param {() => void} retry */
function failed(error, retry) {
  if (error instanceof ApiError && error.status === 401) {
    askForKey(retry);
    return;
  }
  if (!(error instanceof ApiError)) throw error;
  problem(error.message, error.retry ? retry : null);
}

/** @param {() => void} then */
function askForKey(then) {
  const dialog = get("key-dialog", HTMLDialogElement);
  input("key").value = key();
  dialog.onclose = () => {
    setKey(input("key").value.trim());
    then();
  };
  if (!dialog.open) dialog.showModal();
}

/** Begin a new text from the form. */
async function submit() {
  if (writing) return;
  const chat = form.mode() === "chat", text = area("prompt").value;
  if (text === "" && !(chat && conversation.at(-1)?.role === "user")) {
    problem("The message is empty; write one.");
    area("prompt").focus();
    return;
  }
  let asked;
  const wanted = chat && text !== "" ? [...conversation, { role: "user", content: text }] : conversation;
  try {
    asked = form.request(wanted);
  } catch (error) {
    if (!(error instanceof form.FieldError)) throw error;
    const field = element(error.id);
    const part = field.closest("details");
    if (part) part.open = true;
    problem(error.message);
    field.focus();
    return;
  }
  if (chat) {
    conversation = wanted;
    area("prompt").value = "";
    showConversation();
  }
  await first(asked, form.speculation());
}

/** Write the first text of a prompt, with which the others are compared. @param {{path: string, body: Record<string, any>}} asked @param {Speculation} speculation */
async function first(asked, speculation) {
  change({ kind: "clear" });
  element("race-part").hidden = true;
  element("verdict").textContent = "";
  element("if-text").textContent = "";
  element("if-chart").replaceChildren();
  remember();
  finished(await write(asked, speculation, input("likeliest").checked, () => first(asked, speculation)));
}

/** Add the text of a run to the conversation. @param {Run} run */
function finished(run) {
  if (run.path.includes("chat") && run.text !== "" && (run.status === "done" || run.status === "cancelled") && run === state.runs[0]) {
    conversation = [...conversation, { role: "assistant", content: run.text }];
    showConversation();
  }
  remember();
  announce(state);
  redrawSoon();
}

function redrawSoon() {
  tabled = "";
  if (!drawing) {
    drawing = true;
    requestAnimationFrame(redraw);
  }
}

/** @param {Speculation} speculation @returns {string} */
function nameOf({ method, gamma, tree }) {
  if (method === "none") return "no drafter";
  const name = method === "" ? (state.facts?.drafter ?? "the server's drafter") : method === "worst" ? "worst drafter" : method;
  return `${name}${gamma === null ? "" : `, γ=${gamma}`}${tree && method !== "worst" && method !== "" ? ", tree" : ""}`;
}

/** Write the text of the first run again with another drafter. @param {Speculation} speculation @param {boolean} [likeliest] */
async function repeat(speculation, likeliest = input("likeliest").checked) {
  const base = state.runs[0];
  if (!base || writing) return null;
  const { stream, stream_options, speculative_config, ...body } = base.body;
  // with a salt of its own, a run has neither the KV cache nor the drafts that were learned from the text before
  body.cache_salt = crypto.randomUUID();
  const run = await write({ path: base.path, body }, speculation, likeliest, () => repeat(speculation, likeliest));
  if (!comparable(run, base)) throw new Error("the runs cannot be compared");
  announce(state);
  redrawSoon();
  return run;
}

/** Write the text plainly and with drafts, one after the other, without the likeliest tokens, and compare the times. */
async function runRace() {
  const base = state.runs[0];
  if (!base || writing) return;
  const chosen = form.speculation(), other = chosen.method === "none" ? { ...chosen, method: "" } : chosen;
  const plain = await repeat({ method: "none", gamma: null, tree: false }, false);
  if (plain?.status !== "done") return;
  const fast = await repeat(other, false);
  if (fast?.status === "done") race(plain, fast);
}

// ---- conversation, history, links

function showConversation() {
  element("conversation").replaceChildren(...conversation.map((message, at) => {
    const item = make("li", message.role), head = make("div", "row");
    head.append(make("strong", "", message.role === "user" ? "You" : "Model"));
    head.append(action(message.role === "user" ? "Edit" : "Regenerate", () => (message.role === "user" ? edit(at) : regenerate(at))));
    item.append(head, make("p", "", message.content));
    return item;
  }));
}

/** @param {string} name @param {() => void} act */
function action(name, act) {
  const made = make("button", "link", name);
  made.setAttribute("type", "button");
  made.addEventListener("click", act);
  return made;
}

/** Put a message back into the box. What follows it is written again. @param {number} at */
function edit(at) {
  if (writing) return;
  area("prompt").value = conversation[at].content;
  conversation = conversation.slice(0, at);
  showConversation();
  area("prompt").focus();
}

/** Write an answer again with another seed. @param {number} at */
function regenerate(at) {
  if (writing) return;
  conversation = conversation.slice(0, at);
  form.newSeed();
  showConversation();
  submit();
}

function remember() {
  const first = conversation[0]?.content ?? area("prompt").value;
  if (!first) return;
  past.keep({ id: entry, title: first.slice(0, 60), at: Date.now(), values: form.values(), conversation });
  history.replaceState(null, "", new URL(form.link(conversation.at(-1)?.role === "assistant" ? conversation.slice(0, -1) : conversation)).hash);
  showHistory();
}

function showHistory() {
  element("history").replaceChildren(...past.entries().map((each) => {
    const item = make("li");
    item.append(action(each.title, () => open(each.values, each.conversation, each.id)), action("Delete", () => {
      past.drop(each.id);
      showHistory();
    }));
    return item;
  }));
}

/** @param {any} values @param {any} messages @param {string} id */
function open(values, messages, id) {
  if (writing) return;
  entry = id;
  form.restore(values);
  conversation = form.messages(messages);
  showMode();
  showConversation();
  change({ kind: "clear" });
  redrawSoon();
}

function startOver() {
  if (writing) return;
  area("prompt").value = "";
  open({}, [], crypto.randomUUID());
  element("dice-part").hidden = element("race-part").hidden = element("time-part").hidden = element("if-part").hidden = true;
  element("plain-part").hidden = true;
  element("figures").textContent = "";
  area("prompt").focus();
}

function showMode() {
  const chat = form.mode() === "chat";
  element("chat-part").hidden = !chat;
  element("prompt-label").textContent = chat ? "Message" : "Text to continue";
}

/** @param {string} title @param {() => string} text */
async function copy(title, text) {
  let copied;
  try {
    copied = text();
  } catch (error) {
    if (!(error instanceof form.FieldError)) throw error;
    problem(error.message);
    return;
  }
  get("copy-text", HTMLTextAreaElement).value = copied;
  element("copy-title").textContent = title;
  get("copy-dialog", HTMLDialogElement).showModal();
  get("copy-text", HTMLTextAreaElement).select();
  try {
    await navigator.clipboard.writeText(copied);
    element("copy-title").textContent = `${title}: copied`;
  } catch {
    // no right to write to the clipboard: the dialog shows the text
  }
}

/** @returns {{path: string, body: Record<string, any>}} the request of the form, or of the run in the ribbon */
function current() {
  const text = area("prompt").value;
  const run = runOf(state, state.shown);
  if (run && text === "") {
    const { stream, stream_options, cache_salt, ...body } = run.body;
    return { path: run.path, body };
  }
  const asked = form.request(form.mode() === "chat" && text !== "" ? [...conversation, { role: "user", content: text }] : conversation);
  return { path: asked.path, body: { ...asked.body, ...form.speculative(form.speculation(), state.facts) } };
}

// ---- the beginning

async function connect() {
  try {
    const facts = await (await call("/playground/facts")).json();
    change({ kind: "facts", facts });
    element("server").textContent = `${facts.models[0]} · ${facts.description}`;
    document.title = `${facts.models[0]} – Paceline playground`;
    const methods = facts.methods.map((/** @type {string} */ name) => ({ value: name, text: name === "worst" ? "worst drafter in the world" : name }));
    const chosen = select("method").value;
    fill("method", [{ value: "", text: `${facts.drafter} (the server's)` }, { value: "none", text: "no drafter" }, ...methods]);
    const others = methods.filter((/** @type {{value: string}} */ each) => each.value !== "worst");
    fill("other-method", [{ value: "", text: facts.drafter }, ...others]);
    fill("if-method", others);
    select("method").value = chosen;
    if (others.length) select("other-method").value = others[0].value;
    input("temperature").placeholder = String(facts.default_temperature);
    if (!facts.has_template) {
      form.setMode("completion");
      input("max_tokens").value ||= "200";
    }
    const found = form.linked(location.hash);
    if (found) {
      form.restore(found);
      conversation = form.messages(found.conversation);
      showConversation();
    }
    showMode();
  } catch (error) {
    failed(error, connect);
  }
}

/** @param {boolean} dark */
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  button("theme").setAttribute("aria-pressed", String(dark));
  localStorage.setItem(THEME, dark ? "dark" : "light");
}

/** @param {boolean} operating */
function setView(operating) {
  element("write").hidden = operating;
  element("operator").hidden = !operating;
  button("view-write").setAttribute("aria-pressed", String(!operating));
  button("view-operator").setAttribute("aria-pressed", String(operating));
  if (operating) operator.start();
  else operator.stop();
}

/** @returns {Speculation} */
function other() {
  return { method: select("other-method").value, gamma: Number(input("other-gamma").value) || 5, tree: input("other-tree").checked };
}

async function replay() {
  const run = runOf(state, state.shown);
  input("if-gamma").setAttribute("aria-valuetext", input("if-gamma").value);
  element("if-gamma-shown").textContent = input("if-gamma").value;
  if (!run || run.status !== "done") return;
  replaying?.abort();
  replaying = new AbortController();
  await whatIf(run, replaying.signal);
}

/** @param {string} id @param {() => void} act */
const click = (id, act) => button(id).addEventListener("click", act);

function listen() {
  get("ask", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  click("stop-writing", () => writing?.abort());
  click("new", startOver);
  click("dice", form.newSeed);
  click("example", () => {
    area("prompt").value = form.mode() === "chat" ? "Name the planets of the solar system, with one fact about each." : "Once upon a time, there was a little girl who loved to play outside. One day,";
    submit();
  });
  click("no-drafter", () => repeat({ method: "none", gamma: null, tree: false }));
  click("worst-drafter", () => repeat({ method: "worst", gamma: 5, tree: false }));
  click("other-drafter", () => repeat(other()));
  click("race", runRace);
  click("copy-link", () => copy("Link", () => form.link(conversation.at(-1)?.role === "assistant" ? conversation.slice(0, -1) : conversation)));
  click("copy-curl", () => copy("curl", () => {
    const { path, body } = current();
    return form.asCurl(path, body, key() !== "");
  }));
  click("copy-python", () => copy("Python", () => {
    const { path, body } = current();
    return form.asPython(path, body, state.facts?.models[0] ?? "");
  }));
  click("forget", () => {
    past.dropAll();
    showHistory();
  });
  click("theme", () => setTheme(button("theme").getAttribute("aria-pressed") !== "true"));
  click("view-write", () => setView(false));
  click("view-operator", () => setView(true));
  click("problem-close", () => (element("problem").hidden = true));
  click("retry", () => {
    element("problem").hidden = true;
    again?.();
  });
  get("operator-form", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    operator.start();
  });
  for (const id of ["if-gamma", "if-tree", "if-method"]) element(id).addEventListener("input", replay);
  for (const radio of document.querySelectorAll("input[name=mode]")) radio.addEventListener("change", showMode);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && writing && !document.querySelector("dialog[open]")) {
      event.preventDefault();
      writing.abort();
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !element("write").hidden) {
      event.preventDefault();
      submit();
    }
  });
  addEventListener("resize", redrawSoon);
}

form.setMode("chat");
form.newSeed();
const theme = localStorage.getItem(THEME);
setTheme(theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
listen();
showHistory();
connect();
