/**
 * A device's state between visits of its page, in IndexedDB: one database for each federation. A `put` is atomic, so the
 * page may be closed at any moment.
 */
const ENTRIES = "entries", PATIENCE_MILLISECONDS = 2000;

/** The database of a federation in this browser. */
export class Store {
  /** Open it; create it if it is missing. */
  static async open(federation) {
    const request = indexedDB.open(databaseOf(federation), 1);
    request.onupgradeneeded = () => request.result.createObjectStore(ENTRIES);
    return new Store(federation, await done(request));
  }

  constructor(federation, database) {
    this.federation = federation;
    this.database = database;
    database.onversionchange = () => database.close(); // another tab deletes it
  }

  /** Return an entry, or undefined. */
  get(key) {
    return done(this.database.transaction(ENTRIES).objectStore(ENTRIES).get(key));
  }

  /** Keep entries, { key: value }; a value of undefined is deleted. */
  put(entries) {
    const transaction = this.database.transaction(ENTRIES, "readwrite", { durability: "strict" });
    const store = transaction.objectStore(ENTRIES);
    for (const [key, value] of Object.entries(entries)) {
      if (value === undefined) store.delete(key);
      else store.put(value, key);
    }
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(explained(transaction.error));
    });
  }

  /** Delete the database. */
  async delete() {
    this.database.close();
    await done(indexedDB.deleteDatabase(databaseOf(this.federation)));
  }
}

const databaseOf = (federation) => `sparrow ${federation}`;

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(explained(request.error));
    // It may be this page's own connection that blocks, which takes a moment to close.
    request.onblocked = () => setTimeout(
      () => reject(new Error("this federation is open in another tab; close that tab first")), PATIENCE_MILLISECONDS);
  });
}

function explained(error) {
  const full = error?.name === "QuotaExceededError";
  return full ? new Error("this browser has no storage left for this page; free some and reload the page") : error;
}
