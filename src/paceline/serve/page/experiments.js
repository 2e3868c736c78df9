// The same text again with other drafters: the table of runs, the race and the replays.
import { ApiError, call } from "./api.js";
import { bars, stairs, strip } from "./charts.js";
import { element, get, input, make, select, shown } from "./dom.js";
import { emittedBy, figures, mean, sameBytes } from "./reducer.js";
/** @typedef {import("./types.js").Run} Run */
/** @typedef {import("./types.js").State} State */

/** @param {Run} run @param {Run} base @returns {boolean} whether two runs had the same prompt, seed and settings */
export function comparable(run, base) {
  const plain = (/** @type {Run} */ { body: { speculative_config, stream_options, cache_salt, ...body } }) => JSON.stringify(Object.entries(body).sort());
  return run.path === base.path && plain(run) === plain(base);
}

/**
 * Compare the texts of two runs that ended.
 * @param {Run} run @param {Run} base
 * @returns {{kind: "same" | "other" | "open", text: string}}
 */
export function compare(run, base) {
  if (run === base) return { kind: "open", text: "the first" };
  if (run.status !== "done" || base.status !== "done") return { kind: "open", text: run.status === "running" ? "…" : "stopped" };
  const ids = (/** @type {Run} */ each) => each.rounds.flatMap(emittedBy).join();
  if (sameBytes(run.text, base.text) && ids(run) === ids(base)) return { kind: "same", text: "identical, byte for byte" };
  return { kind: "other", text: "NOT the same text" };
}

/** @param {State} state @param {(id: number) => void} show */
export function table(state, show) {
  const body = /** @type {HTMLElement} */ (get("runs", HTMLTableElement).tBodies[0]);
  const base = state.runs[0];
  body.replaceChildren(...state.runs.map((run) => {
    const row = make("tr", run.id === state.shown ? "shown" : ""), name = make("td"), choose = make("button", "link", run.title);
    choose.setAttribute("type", "button");
    choose.setAttribute("aria-pressed", String(run.id === state.shown));
    choose.addEventListener("click", () => show(run.id));
    name.append(choose);
    const { drafted, accepted, rounds, tau, written } = figures(run), seconds = run.milliseconds / 1000;
    const cells = [shown(tau), drafted ? `${accepted} of ${drafted}` : "–", String(rounds), shown(seconds), shown(written / seconds, 1)];
    row.append(name, ...cells.map((text) => make("td", "", run.status === "running" ? "…" : text)));
    const verdict = compare(run, base), cell = make("td"), badge = make("span", `badge ${verdict.kind}`, verdict.text);
    cell.append(badge);
    row.append(cell);
    return row;
  }));
}

/** Say aloud what the comparison of the last run found. @param {State} state */
export function announce(state) {
  const base = state.runs[0], last = state.runs[state.runs.length - 1];
  if (!base || last === base || !last || last.status !== "done") return;
  const verdict = compare(last, base), box = element("verdict");
  const { accepted, drafted } = figures(last);
  const why = state.facts?.keeps_text === false ? " The rule of this server keeps the distribution of the text, not the text." : "";
  box.className = verdict.kind;
  box.textContent = verdict.kind === "same"
    ? `${last.title}: identical, byte for byte, to “${base.title}” (${last.text.length} characters compared). ${accepted} of ${drafted} drafted tokens were accepted.`
    : `${last.title}: the text is NOT the same as “${base.title}”. This breaks the promise of Paceline: report it.${why}`;
}

/** @param {Run} plain @param {Run} fast */
export function race(plain, fast) {
  element("race-part").hidden = false;
  stairs(element("race-chart"), [
    { name: plain.title, kind: "plain", steps: steps(plain) },
    { name: fast.title, kind: "fast", steps: steps(fast) },
  ]);
  const same = sameBytes(plain.text, fast.text);
  const told = `Measured one after the other, on the same machine, at the page. ${plain.title}: ${shown(plain.milliseconds, 0)} ms; ${fast.title}: ${shown(fast.milliseconds, 0)} ms. Ratio ${shown(plain.milliseconds / fast.milliseconds)}. ${bound(plain, fast)} ${same ? "The texts are identical, byte for byte." : "The texts are NOT the same."}`;
  element("race-text").textContent = told;
}

/** @param {Run} run */
function steps(run) {
  let tokens = 0;
  return run.rounds.map((round, at) => ({ at: run.arrivals[at], tokens: (tokens += emittedBy(round).length) }));
}

/** @param {Run} plain @param {Run} fast @returns {string} the bound τ/(v+γc) from the measured rounds */
export function bound(plain, fast) {
  const known = (/** @type {Run} */ run) => run.rounds.flatMap((round) => (round.parts ? [round.parts] : []));
  const one = mean(known(plain).map((parts) => parts.forward)), drafted = known(fast);
  if (!one || !drafted.length) return "The bound τ/(v+γc) is not known: the parts of these rounds were not timed.";
  const v = mean(drafted.map((parts) => parts.forward)) / one, c = mean(drafted.map((parts) => parts.draft)) / one;
  const { tau } = figures(fast);
  return `The bound is τ/(v+γc) = ${shown(tau)} / (${shown(v)} + ${shown(c)}) = ${shown(tau / (v + c))}.`;
}

/** @param {Run} run */
export function times(run) {
  const part = element("time-part");
  part.hidden = run.rounds.length === 0;
  if (part.hidden) return;
  bars(element("time-chart"), run.rounds);
  const total = run.rounds.reduce((sum, round) => sum + round.seconds, 0), parts = run.rounds.flatMap((round) => (round.parts ? [round.parts] : []));
  const draft = parts.reduce((sum, each) => sum + each.draft, 0), forward = parts.reduce((sum, each) => sum + each.forward, 0);
  element("time-text").textContent = parts.length
    ? `${run.rounds.length} rounds took ${shown(1000 * total, 0)} ms: draft ${shown((100 * draft) / total, 0)} %, forward pass of the target ${shown((100 * forward) / total, 0)} %, rest ${shown((100 * (total - draft - forward)) / total, 0)} %.`
    : `${run.rounds.length} rounds took ${shown(1000 * total, 0)} ms. Their parts are not timed on this device.`;
}

/** Ask the server what another drafter would have given. @param {Run} run @param {AbortSignal} signal */
export async function whatIf(run, signal) {
  const box = element("if-text"), tree = input("if-tree").checked, gamma = Number(input("if-gamma").value), method = select("if-method").value;
  box.textContent = "Replaying …";
  try {
    const asked = run.path.includes("chat") ? { messages: run.body.messages, add_generation_prompt: true } : { prompt: run.body.prompt };
    const prompt = (await (await call("/tokenize", { body: asked, signal })).json()).tokens;
    const answer = await (await call("/playground/what-if", { signal, body: {
      prompt, tokens: run.rounds.flatMap(emittedBy), seed: run.body.seed, temperature: run.body.temperature ?? 1, limit: run.body.max_tokens,
      finish: run.finish === "length" ? "length" : "stop", constrained: ["response_format", "regex", "choice"].some((name) => name in run.body), method, gamma, tree,
    } })).json();
    if (!answer.rounds) {
      box.textContent = `Unknown: ${answer.reason}.`;
      element("if-chart").replaceChildren();
      return;
    }
    const before = figures(run), after = figures(answer);
    box.textContent = `Exactly: ${method} with γ=${gamma}${tree ? " and trees" : ""} gives τ ${shown(after.tau)} (this run: ${shown(before.tau)}), ${after.accepted} of ${after.drafted} drafted tokens accepted, ${after.rounds} rounds instead of ${before.rounds}. The text is the same.`;
    strip(element("if-chart"), answer.rounds, `Accepted and rejected tokens of ${after.rounds} replayed rounds`);
  } catch (error) {
    if (signal.aborted) return;
    box.textContent = error instanceof ApiError ? error.message : String(error);
  }
}
