/** Sound files, and recordings of a microphone, to mono samples: `sparrow/reading/sounds.py`. Workers decode no sounds. */
import { DataError } from "./errors.js";

const LARGEST_BYTES = 50_000_000;
const SHORTEST = 0.01; // seconds
const LOUDEST = 2; // decoders of lossy formats overshoot 1 a little
const UNKNOWN_SIZE = 2 ** 31; // programs that write to a pipe put at least this into the header

/**
 * Read a sound at the federation's samples per second; several channels are averaged.
 *
 * raw: { shape: [T], free, rate } of the description. Returns { values: Float32Array [samples] in [-1, 1], channels, rate:
 * the file's own, null where its header does not say it, silent }. Throws DataError, naming the file.
 */
export async function readSound(file, raw) {
  const { name } = file, sound = await decode(file, raw.rate), { length, numberOfChannels: channels } = sound.decoded;
  const values = mono(sound.decoded), loudest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  if (!Number.isFinite(loudest)) {
    throw new DataError(`${name}: has samples that are infinite or not a number; write it again`);
  }
  if (loudest > LOUDEST) throw new DataError(`${name}: has samples up to ${loudest}, beyond 1; scale them to -1 to 1`);
  const promised = sound.header && (sound.header.frames * raw.rate) / sound.header.rate;
  if (length + 2 < promised) {
    throw new DataError(`${name}: is truncated, it ends after ${(length / raw.rate).toPrecision(3)} s; copy it again`);
  }
  checkLength(name, length, raw);
  return {
    values: clipped(values), channels, rate: sound.header?.rate ?? null, silent: loudest === 0,
  };
}

/** Return the beginning of a recording, as long as the federation's sounds may be. The rest as for `readSound`. */
export async function readRecording(file, raw) {
  const values = mono((await decode(file, raw.rate)).decoded).subarray(0, raw.shape[0]);
  checkLength(file.name, values.length, raw);
  return clipped(values);
}

const clipped = (values) => values.map((value) => Math.max(-1, Math.min(1, value)));

async function decode(file, rate) {
  if (!file.size) throw new DataError(`${file.name}: is empty; copy the sound again`);
  if (file.size > LARGEST_BYTES) {
    const [met, most] = [file.size, LARGEST_BYTES].map((size) => Math.round(size / 1e6));
    throw new DataError(`${file.name}: ${met} MB; it must have at most ${most} MB: cut it`);
  }
  const content = await file.arrayBuffer(), header = headerOf(new DataView(content));
  let context = null;
  try {
    context = new OfflineAudioContext(1, 1, rate);
  } catch {
    throw new DataError(`this browser cannot read sounds at ${rate} samples per second; use another one`);
  }
  const decoded = await context.decodeAudioData(content).catch(() => {
    throw new DataError(`${file.name}: cannot be read as a sound; copy it again, or save it as WAV, FLAC, OGG or MP3`);
  });
  return { decoded, header };
}

function mono(decoded) {
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, channel) => decoded.getChannelData(channel));
  if (channels.length === 1) return channels[0];
  return channels[0].map((_, at) => channels.reduce((all, channel) => all + channel[at], 0) / channels.length);
}

function checkLength(name, length, { shape: [longest], free, rate }) {
  const lasts = `${name}: lasts ${(length / rate).toFixed(3)} s`;
  if (length < SHORTEST * rate) {
    throw new DataError(`${name}: lasts ${((1e3 * length) / rate).toPrecision(3)} ms, at least ${1e3 * SHORTEST} ms are needed`);
  }
  if (length > longest || (length < longest && !free.length)) {
    const most = free.length ? "at most " : "";
    throw new DataError(`${lasts}, the federation's sounds last ${most}${(longest / rate).toFixed(3)} s; cut it`);
  }
}

/** Return { rate, frames } that the header of a WAV or FLAC file promises; null for others, and where it does not know. */
function headerOf(view) {
  const mark = (at) => (at + 4 <= view.byteLength ? String.fromCharCode(...new Uint8Array(view.buffer, at, 4)) : "");
  if (mark(0) === "fLaC" && view.byteLength > 26) {
    const frames = (view.getUint8(21) & 15) * 2 ** 32 + view.getUint32(22);
    return frames ? { rate: view.getUint32(18) >>> 12, frames } : null;
  }
  if (mark(0) !== "RIFF" || mark(8) !== "WAVE") return null;
  let rate = 0, width = 0;
  for (let at = 12; at + 8 <= view.byteLength; ) {
    const kind = mark(at), size = view.getUint32(at + 4, true);
    if (kind === "fmt " && at + 22 <= view.byteLength) {
      [rate, width] = [view.getUint32(at + 12, true), view.getUint16(at + 20, true)];
    }
    if (kind === "data") return rate && width && size < UNKNOWN_SIZE ? { rate, frames: Math.floor(size / width) } : null;
    at += 8 + size + (size % 2);
  }
  return null;
}

/** A microphone; there is one only on pages that came over HTTPS. */
export class Microphone {
  #recorder = null;
  #keeps = false;
  #isOn = false;

  /** Whether the browser lets this page ask for a microphone. */
  static get isThere() {
    return Boolean(navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder);
  }

  /** Whether it records now, or asks whether it may. */
  get isOn() {
    return this.#isOn;
  }

  /**
   * Record until `stop`, or `seconds` have passed. began() is called when it records.
   * @returns {Promise<File|null>} null where it was stopped without keeping it
   * @throws {DataError} where the microphone is refused
   */
  async record(seconds, began = () => {}) {
    [this.#isOn, this.#keeps] = [true, true];
    const wanted = { audio: { echoCancellation: false, noiseSuppression: false, autoGainControl: false }, video: false };
    let stream = null, timer = null;
    try {
      stream = await navigator.mediaDevices.getUserMedia(wanted);
      if (!this.#isOn) return null;
      const parts = [];
      this.#recorder = new MediaRecorder(stream);
      this.#recorder.ondataavailable = ({ data }) => parts.push(data);
      const ended = new Promise((resolve) => (this.#recorder.onstop = resolve));
      this.#recorder.start();
      began();
      timer = setTimeout(() => this.stop(), 1000 * seconds);
      await ended;
      return this.#keeps ? new File(parts, "the recording") : null;
    } catch (error) {
      throw new DataError(
        `the microphone did not open (${error.message}); allow it for this page in the browser, or choose sounds`,
      );
    } finally {
      clearTimeout(timer);
      for (const track of stream?.getTracks() ?? []) track.stop();
      [this.#recorder, this.#isOn] = [null, false];
    }
  }

  /** Stop recording; nothing happens where nothing is recorded. keep: whether what was recorded is wanted. */
  stop(keep = true) {
    [this.#keeps, this.#isOn] = [keep, false];
    if (this.#recorder?.state === "recording") this.#recorder.stop();
  }
}
