// Small helpers for plain DOM. Text of models and users goes through `textContent` only.

/**
 * @template {HTMLElement} T
 * @param {string} id @param {new () => T} kind
 * @returns {T}
 */
export function get(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no ${kind.name} with the id ${id}`);
  return found;
}

/** @param {string} id @returns {HTMLElement} */
export const element = (id) => get(id, HTMLElement);
/** @param {string} id @returns {HTMLInputElement} */
export const input = (id) => get(id, HTMLInputElement);
/** @param {string} id @returns {HTMLTextAreaElement} */
export const area = (id) => get(id, HTMLTextAreaElement);
/** @param {string} id @returns {HTMLSelectElement} */
export const select = (id) => get(id, HTMLSelectElement);
/** @param {string} id @returns {HTMLButtonElement} */
export const button = (id) => get(id, HTMLButtonElement);

/**
 * Make an element.
 * @param {string} name @param {string} [kind] its class @param {string} [text]
 * @returns {HTMLElement}
 */
export function make(name, kind = "", text = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an SVG element.
 * @param {string} name @param {Record<string, string | number>} [attributes] @param {string} [text]
 * @returns {SVGElement}
 */
export function draw(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text) made.textContent = text;
  return made;
}

/** @param {string} id @param {{value: string, text: string}[]} options */
export function fill(id, options) {
  select(id).replaceChildren(...options.map(({ value, text }) => {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = text;
    return made;
  }));
}

/** @param {number} value @param {number} [digits] @returns {string} */
export function shown(value, digits = 2) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

/** @param {string} text @returns {string} a token's text with its white space made visible */
export function visible(text) {
  return text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
}
