// The types of the page, for `tsc --checkJs`. Nothing runs here.

/** @typedef {[number, number]} Share A token id and its probability. */

/**
 * @typedef {object} Round
 * @property {number[]} drafted
 * @property {number[] | null} parents null: a chain
 * @property {number[]} accepted nodes of the draft
 * @property {number | null} own the target's own token
 * @property {boolean} bonus the target's own token follows full acceptance
 * @property {string} why
 * @property {number} seconds
 * @property {{draft: number, forward: number} | null} parts
 * @property {number} position of the first token that the round wrote
 * @property {number[]} lengths characters per token
 * @property {Share[][]} [likeliest] per token
 */

/**
 * @typedef {object} Token
 * @property {number} id
 * @property {string} text
 * @property {"drafted" | "own"} kind
 * @property {number} round index of its round
 * @property {number} place among the tokens of its round
 */

/** @typedef {{method: string, gamma: number | null, tree: boolean}} Speculation "" is the server's drafter. */

/**
 * @typedef {object} Run
 * @property {number} id
 * @property {string} title
 * @property {string} path
 * @property {Record<string, any>} body
 * @property {"running" | "done" | "cancelled" | "failed"} status
 * @property {Token[]} tokens
 * @property {Round[]} rounds
 * @property {number[]} arrivals milliseconds from the request to each round
 * @property {string} text
 * @property {Record<string, string>} texts of token ids
 * @property {any} usage
 * @property {string} finish
 * @property {number} bytes of the stream
 * @property {number} milliseconds
 * @property {string} drafter
 */

/**
 * @typedef {object} Facts
 * @property {string[]} models
 * @property {string} description
 * @property {number} slots
 * @property {number} max_model_len
 * @property {string} drafter
 * @property {number} gamma
 * @property {boolean} speculates
 * @property {boolean} takes_prediction
 * @property {boolean} keeps_text
 * @property {number} default_temperature
 * @property {boolean} has_template
 * @property {string[]} methods
 * @property {number} deepest
 * @property {boolean} replays
 */

/** @typedef {{role: string, content: string}} Message */

/**
 * @typedef {object} State
 * @property {Facts | null} facts
 * @property {Run[]} runs
 * @property {number} shown id of the run in the ribbon
 * @property {number | null} pointed index of a token
 * @property {number} version grows with every change
 */

export {};
