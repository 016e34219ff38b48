// Recording movement with a countdown; the movement towards the button is dropped.

import { screen } from "./conditions.js";
import { Recorder } from "./motion.js";
import { $, many, put } from "./words.js";

const COUNTDOWN_SECONDS = 3;
const DROPPED = 2; // the last windows of a recording: the hand that stops it moves the device

/** The buttons and texts to record activities. */
export class MotionPanel {
  /**
   * @param {object} told
   * @param {(values: Float32Array, label: number, group: number) => void} told.found a window [6 * 64] that is kept;
   *   windows of one recording overlap, and have its group, a random number below 2^32
   * @param {(error: Error) => void} told.failed there is nothing to record with
   */
  constructor({ found, failed }) {
    this.told = { found, failed };
    this.label = 0;
    this.timer = null;
    this.isOn = false; // from the countdown until it stops
    this.recorder = new Recorder({
      found: (values) => this.#found(values),
      failed: (error) => {
        this.stop();
        failed(error);
      },
    });
  }

  /** Choose the class of later recordings. */
  choose(label) {
    this.stop();
    this.label = label;
  }

  /** Begin with a countdown, or stop. Throws DataError without sensors. */
  async toggle() {
    if (this.isOn) return this.stop();
    await this.recorder.allow();
    this.isOn = true;
    this.kept = null; // how many, from when it records
    put($("motion-record"), "Stop");
    screen.keepOn("recording", true);
    this.#count(COUNTDOWN_SECONDS);
  }

  /** Stop recording, if it is on. */
  stop() {
    if (!this.isOn) return;
    this.isOn = false;
    clearTimeout(this.timer);
    this.recorder.stop();
    screen.keepOn("recording", false);
    put($("motion-record"), "Record");
    const [kept, short] = ["kept. The last moments were left out.", "Too short: record for at least 3 seconds."];
    put($("motion-state"), this.kept === null ? "" : this.kept > 0 ? `${many(this.kept, "sample")} ${kept}` : short);
  }

  #count(left) {
    put($("motion-state"), left > 0 ? String(left) : "Recording");
    if (left > 0) {
      this.timer = setTimeout(() => this.#count(left - 1), 1000);
      return;
    }
    navigator.vibrate?.(100);
    [this.kept, this.waiting] = [0, []];
    [this.group] = crypto.getRandomValues(new Uint32Array(1));
    this.recorder.start();
  }

  #found(values) {
    this.waiting.push(values);
    if (this.waiting.length <= DROPPED) return;
    this.told.found(this.waiting.shift(), this.label, this.group);
    this.kept += 1;
    put($("motion-state"), `Recording: ${many(this.kept, "sample")}`);
  }
}
