// Requests to the server, and its streams.
/** @typedef {import("./types.js").Run} Run */

const KEY = "paceline.key";

export class ApiError extends Error {
  /** @param {string} message @param {number} status @param {boolean} retry */
  constructor(message, status, retry) {
    super(message);
    this.status = status;
    this.retry = retry;
  }
}

/** @returns {string} */
export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** @param {string} value */
export function setKey(value) {
  sessionStorage.setItem(KEY, value);
}

/**
 * Send a request. Throw an `ApiError` with the server's sentence if it refuses.
 * @param {string} path
 * @param {{body?: any, signal?: AbortSignal, key?: string}} [more]
 * @returns {Promise<Response>}
 */
export async function call(path, more = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  const given = more.key ?? key();
  if (given) headers["Authorization"] = `Bearer ${given}`;
  if (more.body !== undefined) headers["Content-Type"] = "application/json";
  /** @type {Response} */
  let response;
  try {
    const body = more.body === undefined ? undefined : JSON.stringify(more.body);
    response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body, signal: more.signal, cache: "no-store" });
  } catch (error) {
    if (more.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached. Start it again, then try again.", 0, true);
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    const told = (await response.json())?.error?.message;
    if (typeof told === "string") message = told;
  } catch {
    // no JSON: the status says enough
  }
  throw new ApiError(message, response.status, response.status === 429 || response.status >= 500);
}

/**
 * Yield the JSON of every event of a stream, with the bytes that came for it.
 * @param {Response} response
 * @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<{content: any, bytes: number}>}
 */
export async function* events(response, signal) {
  if (response.body === null) throw new ApiError("The answer has no body.", 0, true);
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "", bytes = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      bytes += value.byteLength;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split("\n\n");
      rest = /** @type {string} */ (parts.pop());
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice(6);
        if (data === "[DONE]") return;
        yield { content: JSON.parse(data), bytes };
        bytes = 0;
      }
    }
  } catch (error) {
    if (signal?.aborted || error instanceof ApiError) throw error;
    throw new ApiError(LOST, 0, true);
  } finally {
    reader.releaseLock();
  }
  throw new ApiError(LOST, 0, true);
}

const LOST = "The connection to the server ended before the text did. Try again: the same seed gives the same text.";
