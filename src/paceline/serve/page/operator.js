// The operator's view: lanes of the slots, and the gauges of /metrics.
import { ApiError, call, events, key } from "./api.js";
import { lanes } from "./charts.js";
import { element, get, input, make, shown } from "./dom.js";

const KEY = "paceline.operator-key";
const SPAN = 20; // seconds shown
const GAUGES = {
  num_requests_running: "Sequences in slots",
  num_requests_waiting: "In the queue",
  num_prompts_reading: "Prompts being read",
  kv_cache_usage_perc: "KV cache in use",
  prefix_cache_hits_total: "Prompt tokens from the cache",
  generation_tokens_total: "Tokens written",
  drafter_failures_total: "Failures of drafters",
};

/** @typedef {{lane: number, from: number, to: number, kind: string, share: number, colour: number, title: string}} Mark */

export class Operator {
  /** @param {(message: string) => void} problem */
  constructor(problem) {
    this.problem = problem;
    /** @type {AbortController | null} */ this.watching = null;
    /** @type {Mark[]} */ this.marks = [];
    /** @type {Map<string, {rounds: number, drafted: number, accepted: number}>} */ this.drafters = new Map();
    this.slots = 1;
    this.offset = 0; // the engine's clock minus the page's
    input("operator-key").value = sessionStorage.getItem(KEY) ?? "";
  }

  /** Begin to watch, until `stop`. */
  async start() {
    this.stop();
    const control = (this.watching = new AbortController());
    const given = input("operator-key").value;
    sessionStorage.setItem(KEY, given);
    const used = given || key();
    this.poll(used, control.signal);
    const redraw = () => {
      if (control.signal.aborted) return;
      this.draw();
      setTimeout(() => requestAnimationFrame(redraw), 100);
    };
    redraw();
    try {
      const response = await call("/playground/events", { signal: control.signal, key: used });
      for await (const { content } of events(response, control.signal)) this.take(content);
    } catch (error) {
      if (control.signal.aborted) return;
      this.problem(error instanceof ApiError ? error.message : String(error));
      this.stop();
    }
  }

  stop() {
    this.watching?.abort();
    this.watching = null;
  }

  /** @param {any} event */
  take(event) {
    if (event.slots !== undefined) {
      this.slots = event.slots;
      return;
    }
    this.offset = event.at - performance.now() / 1000;
    for (const [tokens, began, seconds] of event.pieces) {
      this.marks.push({ lane: -1, from: began, to: began + seconds, kind: "piece", share: 1, colour: 0, title: `${tokens} tokens of a prompt in ${shown(1000 * seconds)} ms` });
    }
    let at = event.at;
    const known = this.drafters.get(event.drafter) ?? { rounds: 0, drafted: 0, accepted: 0 };
    this.drafters.set(event.drafter, known);
    const colour = [...this.drafters.keys()].indexOf(event.drafter) % 4;
    for (const [drafted, accepted, emitted, seconds] of [...event.rounds].reverse()) {
      const title = `${event.drafter}: ${accepted} of ${drafted} accepted, ${emitted} written in ${shown(1000 * seconds)} ms`;
      this.marks.push({ lane: event.lane, from: at - seconds, to: at, kind: "round", share: drafted ? (accepted + 1) / (drafted + 1) : 1, colour, title });
      at -= seconds;
      known.rounds += 1;
      known.drafted += drafted;
      known.accepted += accepted;
    }
    const oldest = event.at - 2 * SPAN;
    if (this.marks.length > 4000 || (this.marks[0]?.to ?? oldest) < oldest) this.marks = this.marks.filter((mark) => mark.to >= event.at - SPAN).slice(-4000);
  }

  draw() {
    const most = Math.max(this.slots, ...this.marks.map((mark) => mark.lane + 1));
    lanes(element("lanes"), this.marks, performance.now() / 1000 + this.offset, SPAN, most);
    const rows = [...this.drafters].map(([name, { rounds, drafted, accepted }]) => {
      const row = make("tr");
      row.append(...[name, rounds, drafted, accepted, drafted ? `${shown((100 * accepted) / drafted, 0)} %` : "–"].map((each) => make("td", "", String(each))));
      return row;
    });
    get("acceptance", HTMLTableElement).tBodies[0].replaceChildren(...rows);
  }

  /** Read the gauges once a second. @param {string} used @param {AbortSignal} signal */
  async poll(used, signal) {
    while (!signal.aborted) {
      try {
        const text = await (await call("/metrics", { signal, key: used })).text();
        element("gauges").replaceChildren(...Object.entries(GAUGES).flatMap(([name, label]) => {
          const found = text.match(new RegExp(`^\\w+:${name}\\{[^}]*\\} ([-+.\\de]+)$`, "m"));
          const value = found ? Number(found[1]) : NaN;
          const box = make("div");
          box.append(make("dt", "", label), make("dd", "", name.endsWith("perc") ? `${shown(100 * value, 0)} %` : shown(value, 0)));
          return [box];
        }));
      } catch (error) {
        if (!signal.aborted && error instanceof ApiError) this.problem(error.message);
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}
