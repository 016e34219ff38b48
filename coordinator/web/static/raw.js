/** Raw samples, as a preparation's description has them: their types, and pictures and records in their axes. */

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
 * Return the shape of what is drawn, photographed or recorded for a federation: [C, H, W] or [C, T]; its input's without a
 * description. Of pictures only the scale of bytes is known, so that others come from files; null for these and rows.
 *
 * raw: { dtype, shape, axes } of the description, or null.
 */
export function givenShape({ raw, inputShape }) {
  if (!raw) return inputShape;
  const { dtype, shape, axes } = raw, [first, second, third] = shape;
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
