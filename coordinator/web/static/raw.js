/** Raw samples as a preparation describes them: types, and the axes of pictures and records. */
import { readPixels } from "./pixels.js";

/** Types of raw samples -> their arrays, and the limits of integers. */
export const RAW = {
  float32: Float32Array, uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array, int16: Int16Array, int32: Int32Array,
  int64: BigInt64Array,
};
export const LIMITS = {
  uint8: [0, 255], int8: [-128, 127], uint16: [0, 65535], int16: [-32768, 32767], int32: [-(2 ** 31), 2 ** 31 - 1],
  int64: [Number.MIN_SAFE_INTEGER, Number.MAX_SAFE_INTEGER],
};

/**
 * Return "picture" or "sound" if a federation's samples are such files; else null.
 *
 * raw: { reader, dtype, shape, free, rate } of the description, or null.
 */
export function mediumOf(raw) {
  const { reader, dtype, shape, free, rate } = raw ?? {};
  if (reader === "images" && dtype === "uint8" && shape.length === 3 && shape[2] === 3 && !free.includes(2)) return "picture";
  return reader === "audio" && dtype === "float32" && shape.length === 1 && rate !== null ? "sound" : null;
}

/**
 * Return { values, shape } of a sample as `readMedium` returns it: a picture's pixels, or a sound.
 * Throws DataError, naming the picture's file.
 */
export async function decoded(sample, raw) {
  if (sample instanceof Blob) return readPixels(sample, raw);
  return { values: sample, shape: raw.free.length ? [sample.length] : raw.shape };
}

/**
 * Return the shape of a drawing, photograph or recording for a federation: [C, H, W] or [C, T]; the input's shape without a
 * description. null for rows, samples of different sizes, and pictures that are not bytes, which come from files.
 *
 * raw: { dtype, shape, axes, free } of the description, or null.
 */
export function givenShape({ raw, inputShape }) {
  if (!raw) return inputShape;
  const { dtype, shape, axes, free } = raw, [first, second, third] = shape;
  if (free.length || axes.length !== shape.length) return null;
  if (dtype === "uint8") {
    return { HW: [1, first, second], CHW: shape, HWC: [third, first, second] }[axes] ?? null;
  }
  return dtype === "float32" ? ({ CT: shape, TC: [second, first] }[axes] ?? null) : null;
}

/** Return a picture [C, H, W] in grey levels 0..255, or a record [C, T], as a raw sample. */
export function rawSample(values, { dtype, shape, axes }) {
  if (dtype !== "uint8" && axes !== "TC") return Float32Array.from(values);
  const channels = axes === "HWC" ? shape[2] : axes === "TC" ? shape[1] : 1, each = values.length / channels;
  const last = ["HWC", "TC"].includes(axes);
  const ordered = last ? values.map((_, place) => values[(place % channels) * each + Math.floor(place / channels)]) : values;
  return RAW[dtype].from(ordered, dtype === "uint8" ? Math.round : undefined);
}
