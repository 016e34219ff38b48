/**
 * Updates in int8 (`sparrow/protocol/quantization.py`, `edge_sdk/device/rounding.py`): integers with a scale for each row,
 * rounded at random; the rounding residual is added to the next update.
 */
import { product } from "./manifest.js";
import { activeAxes, eachBlock, mergeInPlace, pack } from "./masks.js";
import { Generator } from "./pcg64.js";

const LARGEST = 127;
const { fround } = Math;

/** Return the number of packed values of each row, in order. */
function rowLengths(manifest, mask) {
  const lengths = [];
  for (const spec of manifest.shared) {
    const [rows, columns] = activeAxes(manifest, spec, mask);
    if (spec.shape.length < 2) {
      lengths.push(rows?.length ?? spec.size);
      continue;
    }
    const width = (columns?.length ?? spec.shape[1]) * product(spec.shape.slice(2));
    for (let row = 0; row < (rows?.length ?? spec.shape[0]); row++) lengths.push(width);
  }
  return lengths;
}

/**
 * Return { numbers: Int8Array [n], scales: Float32Array [rows], owed: Map }: an update as integers, and its rounding
 * residual. values, base: Float32Array [n], the update and the values received. owed: the residual so far,
 * Map name -> Float32Array, or null. seed: BigInt.
 */
export function roundUpdate(manifest, mask, values, base, owed, seed) {
  const change = values.map((value, place) => value - base[place]);
  if (owed) {
    const before = pack(manifest, owed, mask);
    for (let i = 0; i < change.length; i++) change[i] += before[i];
  }
  const lengths = rowLengths(manifest, mask);
  const scales = new Float32Array(lengths.length), numbers = new Int8Array(change.length);
  const chance = Generator.of(seed).random32(change.length);
  let start = 0;
  lengths.forEach((length, row) => {
    let largest = 0;
    for (let i = start; i < start + length; i++) largest = Math.max(largest, Math.abs(change[i]));
    scales[row] = largest / LARGEST;
    const divisor = scales[row] > 0 ? scales[row] : 1;
    for (let i = start; i < start + length; i++) {
      const number = Math.floor(fround(fround(change[i] / divisor) + chance[i]));
      numbers[i] = Math.max(-LARGEST, Math.min(LARGEST, number));
    }
    start += length;
  });
  stayPositive(manifest, mask, values, base, numbers, scales, lengths);
  const left = new Map(manifest.shared.map((spec) =>
    [spec.name, mask && owed ? owed.get(spec.name).slice() : new Float32Array(spec.size)]));
  const rest = new Float32Array(change.length);
  eachValue(lengths, (i, row) => (rest[i] = change[i] - fround(numbers[i] * scales[row])));
  mergeInPlace(manifest, left, rest, mask);
  return { numbers, scales, owed: left };
}

function eachValue(lengths, visit) {
  let i = 0;
  lengths.forEach((length, row) => {
    for (const end = i + length; i < end; i++) visit(i, row);
  });
}

/** Round up in buffers without negative values, such as running variances, if rounding would make a value negative. */
function stayPositive(manifest, mask, values, base, numbers, scales, lengths) {
  const rows = new Int32Array(numbers.length);
  eachValue(lengths, (i, row) => (rows[i] = row));
  eachBlock(manifest, mask, (spec, places, begin, end) => {
    if (spec.trainable || base.subarray(begin, end).some((each) => each < 0)) return;
    if (values.subarray(begin, end).some((each) => each < 0)) return;
    for (let i = begin; i < end; i++) {
      const scale = scales[rows[i]] > 0 ? scales[rows[i]] : 1;
      const least = Math.max(-LARGEST, Math.min(0, Math.ceil(fround(-base[i] / scale))));
      numbers[i] = Math.max(numbers[i], least);
    }
  });
}
