// Conversations that this browser keeps. Nothing of them is on the server.
/** @typedef {import("./types.js").Message} Message */
/** @typedef {{id: string, title: string, at: number, values: any, conversation: Message[]}} Entry */

const NAME = "paceline.history", MOST = 30;

/** @returns {Entry[]} */
export function entries() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter((each) => typeof each?.id === "string" && typeof each?.title === "string") : [];
  } catch {
    return [];
  }
}

/** @param {Entry} entry */
export function keep(entry) {
  const others = entries().filter((each) => each.id !== entry.id);
  write([entry, ...others].slice(0, MOST));
}

/** @param {string} id */
export function drop(id) {
  write(entries().filter((each) => each.id !== id));
}

export function dropAll() {
  localStorage.removeItem(NAME);
}

/** Write the entries; leave out the oldest ones if the browser's store is full. @param {Entry[]} all */
function write(all) {
  for (let count = all.length; count >= 0; count--) {
    try {
      localStorage.setItem(NAME, JSON.stringify(all.slice(0, count)));
      return;
    } catch {
      // full: try with one fewer
    }
  }
}
