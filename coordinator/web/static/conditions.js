// The conditions for training that a browser can check, and the lock that keeps the screen on.

/** Watches the battery, the connection and whether the page is in front. */
export class Conditions {
  #battery = null;

  /** @param {() => void} changed called after a change of a condition */
  constructor(changed) {
    this.changed = changed;
    this.wanted = { charging: false, unmetered: false, front: false };
    document.addEventListener("visibilitychange", changed);
    navigator.connection?.addEventListener?.("change", changed);
    this.ready = this.#findBattery();
  }

  async #findBattery() {
    this.#battery = (await navigator.getBattery?.().catch(() => null)) ?? null;
    this.#battery?.addEventListener("chargingchange", this.changed);
  }

  /** The conditions that this browser can check. A connection only if its kind is known, or the user saves data. */
  get canTell() {
    const { connection } = navigator;
    return {
      charging: this.#battery !== null,
      unmetered: Boolean(connection && (connection.type !== undefined || connection.saveData)),
    };
  }

  /** The wanted condition that is not met: "charging", "network" or "hidden"; else null. */
  get reason() {
    const { charging, unmetered, front } = this.wanted;
    if (charging && this.#battery && !this.#battery.charging) return "charging";
    if (unmetered && (navigator.connection?.saveData || navigator.connection?.type === "cellular")) return "network";
    return front && document.hidden ? "hidden" : null;
  }
}

/** Keeps the screen on while a caller wants it, if the browser supports it. */
class Screen {
  #wanting = new Set();
  #lock = null;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#update()); // the browser releases the lock in the background
  }

  /**
   * @param {string} who the caller
   * @param {boolean} wanted
   */
  keepOn(who, wanted) {
    if (wanted === this.#wanting.has(who)) return;
    if (wanted) this.#wanting.add(who);
    else this.#wanting.delete(who);
    this.#update();
  }

  async #update() {
    if (!navigator.wakeLock) return;
    if (this.#wanting.size === 0) {
      await this.#lock?.release();
      this.#lock = null;
    } else if (document.visibilityState === "visible" && (this.#lock === null || this.#lock.released)) {
      this.#lock = await navigator.wakeLock.request("screen").catch(() => null); // refused if the battery is low
      if (this.#wanting.size === 0) this.#update();
    }
  }
}

/** The screen of this device. */
export const screen = new Screen();
