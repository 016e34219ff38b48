// Windows of movement from a phone's sensors, as inputs of the task of human activities.
//
// The data set was recorded on Android: a device at rest with its face up measures +9.8 m/s^2 along z,
// the push of the table (watches of seated people: z 7.7 on average; the mean of -5.0 along x over all windows comes from watches on
// hanging arms). Chrome and Firefox on Android give the same signs. Safari on iPhones and iPads gives all three
// accelerations with the opposite sign; rotations agree.
//
// rotationRate's alpha, beta, gamma are about x, y, z in all three engines and in the specification since 2017
// (w3c/deviceorientation#43), although pages about it still say z, x, y: they mean the angles of deviceorientation.

import { DataError } from "./errors.js";

/** Samples a second in a window. */
export const RATE = 50;
/** Samples in a window. */
export const LENGTH = 64;
/** Values of a sample: acceleration x, y, z in m/s^2 with gravity, rotation x, y, z in rad/s. */
export const CHANNELS = 6;

const HOP = LENGTH / 2;
const LONGEST_GAP = 0.1; // seconds without an event after which a window begins anew: nothing is made up
const PATIENCE_MILLISECONDS = 2000;

/** Turns samples at uneven times into windows at 50 Hz, half overlapping. */
export class Windows {
  /** @param {(values: Float32Array) => void} found called with each window, [6 * 64], channel by channel */
  constructor(found) {
    this.found = found;
    this.#restart(null);
  }

  /**
   * Add a sample; times must grow, and others are left out.
   * @param {number} time in seconds
   * @param {number[]} values six of them
   */
  push(time, values) {
    const { last } = this;
    if (last && time <= last.time) return;
    if (!last || time - last.time > LONGEST_GAP) return void this.#restart({ time, values });
    for (let at = this.start + this.count / RATE; at <= time; at = this.start + this.count / RATE) {
      const share = (at - last.time) / (time - last.time);
      this.#add(last.values.map((value, channel) => value + share * (values[channel] - value)));
    }
    this.last = { time, values };
  }

  #restart(first) {
    this.last = first;
    this.rows = [];
    this.start = first?.time ?? 0;
    this.count = 0; // of rows since the start: times are counted up, so that errors do not grow
  }

  #add(row) {
    this.count += 1;
    this.rows.push(row);
    if (this.rows.length < LENGTH) return;
    const values = new Float32Array(CHANNELS * LENGTH);
    this.rows.forEach((row, index) => row.forEach((value, channel) => (values[channel * LENGTH + index] = value)));
    this.rows.splice(0, HOP);
    this.found(values);
  }
}

/**
 * The six values of an event, in the data set's units, axes and signs.
 * @param {DeviceMotionEvent} event
 * @param {boolean} opposite whether this browser gives accelerations with the opposite sign, see `hasOppositeSigns`
 * @returns {number[]|null} null if a sensor is missing
 */
export function valuesOf(event, opposite) {
  const { accelerationIncludingGravity: acceleration, rotationRate: rotation } = event;
  const values = [acceleration?.x, acceleration?.y, acceleration?.z, rotation?.alpha, rotation?.beta, rotation?.gamma];
  if (values.some((value) => !Number.isFinite(value))) return null;
  const sign = opposite ? -1 : 1;
  return values.map((value, channel) => (channel < 3 ? sign * value : (value * Math.PI) / 180));
}

/** Whether this is an iPhone or an iPad (which may call itself a Mac), on which every browser is Safari underneath. */
export function hasOppositeSigns({ userAgent, maxTouchPoints } = navigator) {
  return /iPhone|iPad|iPod/.test(userAgent) || (/Macintosh/.test(userAgent) && maxTouchPoints > 1);
}

/** Records windows from this device's sensors. */
export class Recorder {
  /**
   * @param {object} told
   * @param {(values: Float32Array) => void} told.found gets each window, [6 * 64]
   * @param {(error: DataError) => void} told.failed the sensors are silent; recording has stopped
   */
  constructor({ found, failed }) {
    this.told = { found, failed };
    this.windows = null;
    this.opposite = hasOppositeSigns();
    this.listen = (event) => this.#event(event);
  }

  /** Whether it records now. */
  get isRecording() {
    return this.windows !== null;
  }

  /**
   * Ask for the sensors; on iPhones it must be called while a press of a button is handled.
   * @throws {DataError} where there are none, or they are refused
   */
  async allow() {
    if (typeof DeviceMotionEvent === "undefined") {
      throw new DataError(
        isSecureContext
          ? "this browser has no motion sensors; use a phone, or give a file"
          : "over plain HTTP there are no motion sensors; ask for a link with HTTPS, or give a file",
      );
    }
    if (typeof DeviceMotionEvent.requestPermission !== "function") return;
    const answer = await DeviceMotionEvent.requestPermission().catch((error) => error.message);
    if (answer !== "granted") {
      throw new DataError(
        `the motion sensors were refused (${answer}); allow them for this page in the browser and reload it`,
      );
    }
  }

  /** Record until `stop`. */
  start() {
    this.stop();
    this.windows = new Windows(this.told.found);
    addEventListener("devicemotion", this.listen);
    this.patience = setTimeout(() => this.#silent(), PATIENCE_MILLISECONDS);
  }

  /** Stop recording; the unfinished window is dropped. */
  stop() {
    removeEventListener("devicemotion", this.listen);
    clearTimeout(this.patience);
    this.windows = null;
  }

  #event(event) {
    const values = valuesOf(event, this.opposite);
    if (values === null) return;
    clearTimeout(this.patience);
    this.windows?.push(event.timeStamp / 1000, values);
  }

  #silent() {
    this.stop();
    this.told.failed(
      new DataError(
        "no movement could be read: an accelerometer and a gyroscope are wanted; use a phone, allow motion sensors " +
          "for this page in the browser, or give a file",
      ),
    );
  }
}
