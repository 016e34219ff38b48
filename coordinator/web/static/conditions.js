// When this device should not train now, as far as a browser can tell, and keeping its screen on.

/** Watches the battery, the connection and whether the page is in front. */
export class Conditions {
  #battery = null;

  /** @param {() => void} changed called where something that is watched has changed */
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

  /** What the browser can tell: of a metered connection only where it knows the kind, or was told to save data. */
  get canTell() {
    const { connection } = navigator;
    return {
      charging: this.#battery !== null,
      unmetered: Boolean(connection && (connection.type !== undefined || connection.saveData)),
    };
  }

  /** Why to pause now by what is wanted: "charging", "network" or "hidden"; null for no reason. */
  get reason() {
    const { charging, unmetered, front } = this.wanted;
    if (charging && this.#battery && !this.#battery.charging) return "charging";
    if (unmetered && (navigator.connection?.saveData || navigator.connection?.type === "cellular")) return "network";
    return front && document.hidden ? "hidden" : null;
  }
}

/** Keeps the screen on while someone wants it, where the browser lets it. */
class Screen {
  #wanting = new Set();
  #lock = null;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#update()); // the browser lets go of it in the background
  }

  /**
   * @param {string} who wants it or no longer does
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
      this.#lock = await navigator.wakeLock.request("screen").catch(() => null); // refused where the battery is low
      if (this.#wanting.size === 0) this.#update();
    }
  }
}

/** The screen of this device. */
export const screen = new Screen();
