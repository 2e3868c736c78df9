// The state of the page. Every change goes through `reduce`.
/** @typedef {import("./types.js").State} State */
/** @typedef {import("./types.js").Run} Run */
/** @typedef {import("./types.js").Round} Round */

/** @returns {State} */
export function begin() {
  return { facts: null, runs: [], shown: 0, pointed: null, version: 0 };
}

/**
 * @typedef {{kind: "facts", facts: any} | {kind: "clear"} | {kind: "run", run: Run}
 *   | {kind: "chunk", run: number, chunk: any, at: number, bytes: number}
 *   | {kind: "end", run: number, status: Run["status"], at: number}
 *   | {kind: "show", run: number} | {kind: "point", token: number | null}} Action
 */

/**
 * Apply an action to the state, in place.
 * @param {State} state @param {Action} action
 */
export function reduce(state, action) {
  state.version += 1;
  switch (action.kind) {
    case "facts":
      state.facts = action.facts;
      break;
    case "clear":
      state.runs = [];
      state.shown = 0;
      state.pointed = null;
      break;
    case "run":
      state.runs.push(action.run);
      state.shown = action.run.id;
      state.pointed = null;
      break;
    case "chunk": {
      const run = runOf(state, action.run);
      if (run) take(run, action.chunk, action.at, action.bytes);
      break;
    }
    case "end": {
      const run = runOf(state, action.run);
      if (run) {
        run.status = action.status;
        run.milliseconds = action.at;
      }
      break;
    }
    case "show":
      state.shown = action.run;
      state.pointed = null;
      break;
    case "point":
      state.pointed = action.token;
      break;
  }
}

/** @param {State} state @param {number} id @returns {Run | undefined} */
export function runOf(state, id) {
  return state.runs.find((run) => run.id === id);
}

/**
 * Add a chunk of a stream to its run.
 * @param {Run} run @param {any} chunk @param {number} at @param {number} bytes
 */
export function take(run, chunk, at, bytes) {
  run.bytes += bytes;
  if (chunk.usage) run.usage = chunk.usage;
  Object.assign(run.texts, chunk.texts ?? {});
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  if (choice?.finish_reason) run.finish = choice.finish_reason;
  run.text += text;
  const characters = Array.from(text);
  let used = 0;
  for (const round of /** @type {Round[]} */ (chunk.rounds ?? [])) {
    const emitted = emittedBy(round), index = run.rounds.length;
    run.rounds.push(round);
    run.arrivals.push(at);
    emitted.forEach((id, place) => {
      const length = round.lengths[place] ?? 0;
      const own = place === round.accepted.length;
      run.tokens.push({ id, text: characters.slice(used, used + length).join(""), kind: own ? "own" : "drafted", round: index, place });
      used += length;
    });
  }
  const last = run.tokens[run.tokens.length - 1];
  if (used < characters.length && last) last.text += characters.slice(used).join("");
}

/** @param {Round} round @returns {number[]} the tokens that it wrote */
export function emittedBy(round) {
  const tokens = round.accepted.map((node) => round.drafted[node]);
  return round.own === null ? tokens : [...tokens, round.own];
}

/** @param {Round} round @returns {number[]} the parent of every drafted node; -1 is the text */
export function parentsOf(round) {
  return round.parents ?? round.drafted.map((_, node) => node - 1);
}

/**
 * Return the drafted nodes that were rejected at a place of the round: those that the token there was written instead of.
 * @param {Round} round @param {number} place @returns {number[]}
 */
export function rejectedAt(round, place) {
  const above = place ? round.accepted[place - 1] : -1;
  return parentsOf(round).flatMap((parent, node) => (parent === above && node !== round.accepted[place] ? [node] : []));
}

/** @param {Round} round @param {number} node @returns {number} how many drafted tokens follow a node */
export function followers(round, node) {
  const parents = parentsOf(round), below = new Set([node]);
  for (let at = node + 1; at < parents.length; at++) if (below.has(parents[at])) below.add(at);
  return below.size - 1;
}

/**
 * Figures of a run.
 * @param {{rounds: {drafted: number[], accepted: number[], own: number | null}[]}} run
 */
export function figures(run) {
  let drafted = 0, accepted = 0, written = 0;
  for (const round of run.rounds) {
    drafted += round.drafted.length;
    accepted += round.accepted.length;
    written += round.accepted.length + (round.own === null ? 0 : 1);
  }
  return { drafted, accepted, written, rounds: run.rounds.length, tau: run.rounds.length ? written / run.rounds.length : 0 };
}

/** @param {string} one @param {string} other @returns {boolean} whether the UTF-8 bytes are the same */
export function sameBytes(one, other) {
  const encoder = new TextEncoder(), left = encoder.encode(one), right = encoder.encode(other);
  return left.length === right.length && left.every((byte, at) => byte === right[at]);
}

/** @param {number[]} values @returns {number} */
export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
}
