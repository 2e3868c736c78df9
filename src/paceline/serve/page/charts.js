// Charts in SVG, drawn by hand.
import { draw, shown } from "./dom.js";
/** @typedef {import("./types.js").Round} Round */

/** @param {HTMLElement} box @returns {number} the width of a chart: a unit is a pixel, so that its words have one size */
const widthOf = (box) => Math.max(280, box.clientWidth - 2);

/** @param {HTMLElement} box @param {number} height @param {string} label @returns {SVGElement} */
function canvas(box, height, label) {
  const made = draw("svg", { viewBox: `0 0 ${widthOf(box)} ${height}`, role: "img", "aria-label": label });
  box.replaceChildren(made);
  return made;
}

/**
 * Draw the tokens of runs against milliseconds, on one axis.
 * @param {HTMLElement} box
 * @param {{name: string, kind: string, steps: {at: number, tokens: number}[]}[]} runs
 */
export function stairs(box, runs) {
  const height = 240, left = 40, bottom = height - 26, right = widthOf(box) - 8, top = 8;
  const last = Math.max(1, ...runs.flatMap((run) => run.steps.map((step) => step.at)));
  const most = Math.max(1, ...runs.flatMap((run) => run.steps.map((step) => step.tokens)));
  const x = (/** @type {number} */ at) => left + ((right - left) * at) / last;
  const y = (/** @type {number} */ tokens) => bottom - ((bottom - top) * tokens) / most;
  const chart = canvas(box, height, runs.map((run) => `${run.name}: ${run.steps.at(-1)?.tokens ?? 0} tokens in ${shown(run.steps.at(-1)?.at ?? 0, 0)} milliseconds`).join("; "));
  axis(chart, left, bottom, right, top);
  for (const share of [0, 0.5, 1]) {
    chart.append(draw("text", { x: x(share * last), y: height - 8, class: share ? "end" : "", "text-anchor": share === 1 ? "end" : share ? "middle" : "start" }, `${shown(share * last, 0)} ms`));
    chart.append(draw("text", { x: left - 4, y: y(share * most) + 4, "text-anchor": "end" }, shown(share * most, 0)));
  }
  runs.forEach((run, row) => {
    let path = `M ${x(0)} ${y(0)}`, before = 0;
    for (const step of run.steps) {
      path += ` L ${x(step.at).toFixed(1)} ${y(before).toFixed(1)} L ${x(step.at).toFixed(1)} ${y(step.tokens).toFixed(1)}`;
      before = step.tokens;
    }
    chart.append(draw("path", { d: path, class: `line ${run.kind}` }));
    chart.append(draw("path", { d: `M ${left + 12} ${top + 12 + 18 * row} h 26`, class: `line ${run.kind}` }));
    chart.append(draw("text", { x: left + 44, y: top + 16 + 18 * row }, run.name));
  });
}

/** @param {SVGElement} chart @param {number} left @param {number} bottom @param {number} right @param {number} top */
function axis(chart, left, bottom, right, top) {
  chart.append(draw("path", { d: `M ${left} ${top} V ${bottom} H ${right}`, class: "axis" }));
}

const BARS = 160; // rounds that fit

/**
 * Draw a bar per round: draft, forward pass, rest.
 * @param {HTMLElement} box @param {Round[]} rounds
 */
export function bars(box, rounds) {
  const height = 150, left = 40, bottom = height - 20, top = 8, right = widthOf(box) - 8;
  const drawn = rounds.slice(-BARS), known = drawn.some((round) => round.parts);
  const most = Math.max(1e-9, percentile(drawn.map((round) => round.seconds), 0.98)), wide = (right - left) / Math.max(20, drawn.length);
  const chart = canvas(box, height, `Seconds of ${drawn.length} rounds`);
  axis(chart, left, bottom, right, top);
  chart.append(draw("text", { x: left - 4, y: top + 8, "text-anchor": "end" }, shown(1000 * most, 1)));
  chart.append(draw("text", { x: left - 4, y: bottom, "text-anchor": "end" }, "ms"));
  drawn.forEach((round, at) => {
    const parts = round.parts ? [round.parts.draft, round.parts.forward, Math.max(0, round.seconds - round.parts.draft - round.parts.forward)] : [0, 0, round.seconds];
    let used = 0;
    parts.forEach((seconds, part) => {
      const tall = ((bottom - top) * Math.min(seconds, most - used)) / most;
      if (tall <= 0) return;
      used += Math.min(seconds, most - used);
      const y = bottom - ((bottom - top) * used) / most;
      chart.append(draw("rect", { x: left + at * wide + 0.5, y, width: Math.max(0.5, wide - 1), height: tall, class: ["draft", "forward", "rest"][part] }));
    });
  });
  ["draft", "forward pass", "rest"].forEach((name, part) => {
    if (!known && part < 2) return;
    chart.append(draw("rect", { x: left + 10 + 110 * part, y: height - 12, width: 10, height: 10, class: ["draft", "forward", "rest"][part] }));
    chart.append(draw("text", { x: left + 26 + 110 * part, y: height - 3 }, name));
  });
}

/** @param {number[]} values @param {number} share */
function percentile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
}

/**
 * Draw the accepted tokens of every round as a strip of cells.
 * @param {HTMLElement} box @param {{drafted: number[], accepted: number[], own: number | null}[]} rounds @param {string} label
 */
export function strip(box, rounds, label) {
  const height = 70, wide = widthOf(box) / Math.max(40, rounds.length), cell = Math.min(8, (height - 6) / 17);
  const chart = canvas(box, height, label);
  rounds.forEach((round, at) => {
    const accepted = round.accepted.length, rejected = Math.min(16, round.drafted.length) - accepted;
    for (let row = 0; row < accepted + 1 + Math.max(0, rejected); row++) {
      const kind = row < accepted ? "drafted" : row === accepted ? "own" : "lost";
      if (kind === "own" && round.own === null) continue;
      chart.append(draw("rect", { x: at * wide + 0.5, y: height - (row + 1) * cell, width: Math.max(0.5, wide - 1), height: Math.max(1, cell - 1), class: kind }));
    }
  });
}

/**
 * Draw lanes over time: rounds by slot, and above them the pieces of prompts, which have the lane -1.
 * @param {HTMLElement} box
 * @param {{lane: number, from: number, to: number, kind: string, share: number, colour: number, title: string}[]} marks
 * @param {number} now @param {number} span @param {number} lanes
 */
export function lanes(box, marks, now, span, lanes) {
  const tall = 26, height = (lanes + 1) * tall + 22, left = 62, width = widthOf(box);
  const x = (/** @type {number} */ at) => left + (width - left) * Math.max(0, 1 - (now - at) / span);
  const chart = canvas(box, height, `${lanes} slots, the last ${span} seconds`);
  for (let lane = 0; lane <= lanes; lane++) {
    chart.append(draw("text", { x: 2, y: lane * tall + 18 }, lane ? `slot ${lane}` : "prompts"));
    chart.append(draw("path", { d: `M ${left} ${lane * tall + tall} H ${width}`, class: "axis" }));
  }
  for (const mark of marks) {
    if (mark.to < now - span) continue;
    const from = x(mark.from), wide = Math.max(1.5, x(mark.to) - from - 0.5), y = (mark.lane + 1) * tall + 4;
    const rect = draw("rect", { x: from, y, width: wide, height: tall - 7, class: mark.kind === "piece" ? "piece" : "lost" });
    rect.append(draw("title", {}, mark.title));
    chart.append(rect);
    if (mark.kind === "round") {
      const full = (tall - 7) * mark.share;
      chart.append(draw("rect", { x: from, y: y + tall - 7 - full, width: wide, height: full, class: `drafter-${mark.colour}` }));
    }
  }
  chart.append(draw("text", { x: left, y: height - 6 }, `${span} s ago`), draw("text", { x: width - 4, y: height - 6, "text-anchor": "end" }, "now"));
}
