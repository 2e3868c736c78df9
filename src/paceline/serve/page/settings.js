// The form: its values, the request that follows from them, and the link that holds them.
import { area, input, select } from "./dom.js";
/** @typedef {import("./types.js").Speculation} Speculation */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./types.js").Facts} Facts */

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"];
const WHOLE = new Set(["max_tokens", "top_k", "min_tokens"]);
const TEXTS = ["system", "prompt", "stop", "logit_bias", "form-value", "prediction", "seed", "gamma"];
const CHOICES = ["form", "method"];
const MARKS = ["ignore_eos", "tree", "likeliest"];

/** @typedef {Record<string, string | boolean>} Values The values of the form, by the ids of its fields. */

/** @param {string} id @returns {HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement} */
function field(id) {
  return /** @type {any} */ (document.getElementById(id));
}

/** @returns {Values} */
export function values() {
  /** @type {Values} */
  const found = { mode: mode() };
  for (const id of [...NUMBERS, ...TEXTS, ...CHOICES]) found[id] = field(id).value;
  for (const id of MARKS) found[id] = input(id).checked;
  return found;
}

/** Fill the form. Unknown names and wrong types are left out. @param {any} given */
export function restore(given) {
  if (typeof given !== "object" || given === null) return;
  for (const id of [...NUMBERS, ...TEXTS]) if (typeof given[id] === "string") field(id).value = given[id].slice(0, 1e6);
  for (const id of CHOICES) {
    const known = [...select(id).options].some((option) => option.value === given[id]);
    if (known) select(id).value = given[id];
  }
  for (const id of MARKS) if (typeof given[id] === "boolean") input(id).checked = given[id];
  if (given.mode === "chat" || given.mode === "completion") setMode(given.mode);
}

/** @returns {"chat" | "completion"} */
export function mode() {
  const chosen = document.querySelector("input[name=mode]:checked");
  return chosen instanceof HTMLInputElement && chosen.value === "completion" ? "completion" : "chat";
}

/** @param {"chat" | "completion"} value */
export function setMode(value) {
  const found = document.querySelector(`input[name=mode][value=${value}]`);
  if (found instanceof HTMLInputElement) found.checked = true;
}

export function newSeed() {
  input("seed").value = String(crypto.getRandomValues(new Uint32Array(1))[0]);
}

export class FieldError extends Error {
  /** @param {string} id @param {string} message */
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

/** @returns {Speculation} */
export function speculation() {
  const gamma = input("gamma").value;
  return { method: select("method").value, gamma: gamma === "" ? null : number("gamma", gamma, true), tree: input("tree").checked };
}

/**
 * Return the request that the form describes.
 * @param {Message[]} conversation
 * @returns {{path: string, body: Record<string, any>}}
 */
export function request(conversation) {
  /** @type {Record<string, any>} */
  const body = {};
  const chat = mode() === "chat";
  if (chat) {
    const system = area("system").value;
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  } else body.prompt = area("prompt").value;
  for (const id of NUMBERS) {
    const text = field(id).value;
    if (text !== "") body[id] = number(id, text, WHOLE.has(id));
  }
  body.seed = number("seed", input("seed").value || "0", true);
  const stops = area("stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  if (input("ignore_eos").checked) body.ignore_eos = true;
  if (input("logit_bias").value) body.logit_bias = json("logit_bias", input("logit_bias").value);
  const prediction = area("prediction").value;
  if (prediction) body.prediction = { type: "content", content: prediction };
  Object.assign(body, constraint());
  return { path: chat ? "/v1/chat/completions" : "/v1/completions", body };
}

function constraint() {
  const kind = select("form").value, value = area("form-value").value;
  switch (kind) {
    case "json_object": return { response_format: { type: "json_object" } };
    case "json_schema": return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: json("form-value", value) } } };
    case "regex": return { regex: value };
    case "choice": return { choice: value.split("\n").filter((line) => line !== "") };
    default: return {};
  }
}

/**
 * Return the part of a request that chooses the drafter.
 * @param {Speculation} chosen @param {Facts | null} facts
 */
export function speculative(chosen, facts) {
  if (chosen.method === "none") return { speculative_config: false };
  if (chosen.method === "") {
    if (chosen.gamma === null) return {};
    return { speculative_config: { num_speculative_tokens: Math.min(chosen.gamma, facts?.gamma ?? chosen.gamma) } };
  }
  return { speculative_config: { method: chosen.method, num_speculative_tokens: chosen.gamma ?? 5, ...(chosen.tree ? { tree: true } : {}) } };
}

/** @param {string} id @param {string} text @param {boolean} whole */
function number(id, text, whole) {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value) || (whole && !Number.isInteger(value))) {
    throw new FieldError(id, `${label(id)} must be a ${whole ? "whole " : ""}number, not "${text}".`);
  }
  return value;
}

/** @param {string} id @param {string} text */
function json(id, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new FieldError(id, `${label(id)} is not valid JSON.`);
  }
}

/** @param {string} id */
const label = (id) => document.querySelector(`label[for="${id}"]`)?.textContent ?? id;

// ---- links and commands

/** @param {Message[]} conversation @returns {string} */
export function link(conversation) {
  const bytes = new TextEncoder().encode(JSON.stringify({ ...values(), conversation }));
  const text = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return `${location.origin}${location.pathname}#${text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

/** @param {string} fragment @returns {any} what a link holds, or null */
export function linked(fragment) {
  try {
    const text = atob(fragment.replace(/^#/, "").replaceAll("-", "+").replaceAll("_", "/"));
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(text, (letter) => letter.charCodeAt(0))));
  } catch {
    return null;
  }
}

/** @param {any} given @returns {Message[]} the messages of a link or of the history */
export function messages(given) {
  if (!Array.isArray(given)) return [];
  return given.flatMap((each) => (["user", "assistant"].includes(each?.role) && typeof each?.content === "string" ? [{ role: each.role, content: each.content }] : []));
}

/** @param {string} path @param {Record<string, any>} body @param {boolean} keyed */
export function asCurl(path, body, keyed) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = keyed ? ` \\\n  -H "Authorization: Bearer $PACELINE_API_KEY"` : "";
  return `curl -sN ${location.origin}${path} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`;
}

const OPENAIS = new Set(["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "seed", "logit_bias", "response_format", "prediction"]);

/** @param {string} path @param {Record<string, any>} body @param {string} model */
export function asPython(path, body, model) {
  const chat = path.includes("chat"), extra = Object.entries(body).filter(([name]) => !OPENAIS.has(name) && !name.startsWith("stream"));
  const own = Object.entries(body).filter(([name]) => OPENAIS.has(name)).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");
  const more = extra.length ? `    extra_body=${python(Object.fromEntries(extra))},\n` : "";
  const shown = chat ? "answer.choices[0].message.content" : "answer.choices[0].text";
  return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=os.environ.get("PACELINE_API_KEY", "none"))\n` +
    `answer = client.${chat ? "chat.completions" : "completions"}.create(\n    model=${python(model)},\n${own}${more})\nprint(${shown})\n`;
}

/** @param {any} value @returns {string} a Python literal */
function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
