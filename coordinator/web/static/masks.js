/** Which values of a model are active, and how they are packed: `sparrow/protocol/masks.py`, for masks of neurons. */
import { ProtocolError } from "./errors.js";
import { product, sum } from "./manifest.js";
import { Sha256, utf8 } from "./sha256.js";

export const FULL_RATIO = 0.99;

/** Return the number of active neurons of `size` at `ratio`: max(1, floor(ratio * size)). */
export function activeCount(size, ratio) {
  return ratio >= FULL_RATIO ? size : Math.max(1, Math.floor(ratio * size + 1e-9));
}

/**
 * Return the mask of a draw {key, ratio}: Map group -> Int32Array of active neurons, sorted. In each group the neurons
 * with the smallest SHA-256 of `fedspu|key|group|i` are active.
 */
export function drawNeurons(manifest, { key, ratio }) {
  const sound = typeof key === "string" && !/[|\p{Surrogate}]/u.test(key) && typeof ratio === "number";
  if (!(sound && ratio > 0 && ratio <= 1)) {
    throw new ProtocolError("the assignment's draw must have a key and a ratio between 0 and 1");
  }
  return new Map([...manifest.groups].map(([group, size]) => [group, drawGroup(key, ratio, group, size)]));
}

function drawGroup(key, ratio, group, size) {
  const all = Int32Array.from({ length: size }, (_, index) => index);
  const count = activeCount(size, ratio);
  if (count === size) return all;
  const prefix = new Sha256();
  prefix.update(utf8(`fedspu|${key}|${group}|`));
  const digests = Array.from(all, (index) => {
    const hasher = prefix.clone();
    hasher.update(utf8(String(index)));
    return hasher.digest();
  });
  return Int32Array.from(all).sort((one, other) => compare(digests[one], digests[other])).subarray(0, count).slice().sort();
}

function compare(one, other) {
  for (let i = 0; i < one.length; i++) if (one[i] !== other[i]) return one[i] - other[i];
  return 0;
}

/** Throw ProtocolError unless a mask names every group once, with sorted, different neurons in range. */
export function checkMask(manifest, mask) {
  for (const [group, size] of manifest.groups) {
    const active = mask.get(group);
    const sound = active?.length && active[0] >= 0 && active[active.length - 1] < size
      && active.every((each, place) => place === 0 || each > active[place - 1]);
    if (!sound) throw new ProtocolError(`${group}: active neurons must be sorted and distinct, and there must be at least one`);
  }
}

/** Return whether two masks are the same; null means everything. */
export function sameMask(one, other) {
  if (one === null || other === null) return one === other;
  return [...one].every(([group, active]) => {
    const others = other.get(group);
    return others.length === active.length && active.every((each, place) => each === others[place]);
  });
}

/** Return the active entries of one axis of a tensor, Int32Array, or null if all are. */
export function axisIndex(segments, mask, sizes) {
  if (mask === null || segments.every(({ group }) => mask.get(group).length === sizes.get(group))) return null;
  const places = [];
  let offset = 0;
  for (const { group, repeat } of segments) {
    for (const neuron of mask.get(group)) {
      for (let part = 0; part < repeat; part++) places.push(offset + neuron * repeat + part);
    }
    offset += sizes.get(group) * repeat;
  }
  return Int32Array.from(places);
}

/** Return the active rows and columns of a tensor (null: all). */
export function activeAxes(manifest, spec, mask) {
  return [0, 1].map((axis) => (spec.axes[axis]?.length ? axisIndex(spec.axes[axis], mask, manifest.groups) : null));
}

/** Return the flat places of a tensor's active values, in packed order; null if all are. */
export function placesOf(manifest, spec, mask) {
  const [rows, columns] = activeAxes(manifest, spec, mask);
  if (rows === null && columns === null) return null;
  const [high = 1, wide = 1] = spec.shape;
  const run = product(spec.shape.slice(2));
  const count = (rows?.length ?? high) * (columns?.length ?? wide) * run;
  const places = new Int32Array(count);
  let next = 0;
  for (let row = 0; row < (rows?.length ?? high); row++) {
    const begin = (rows ? rows[row] : row) * wide;
    for (let column = 0; column < (columns?.length ?? wide); column++) {
      const first = (begin + (columns ? columns[column] : column)) * run;
      for (let part = 0; part < run; part++) places[next++] = first + part;
    }
  }
  return places;
}

/** Return the number of a tensor's active values. */
export function sizeOf(manifest, spec, mask) {
  const [rows, columns] = activeAxes(manifest, spec, mask);
  const [high = 1, wide = 1] = spec.shape;
  return (rows?.length ?? high) * (columns?.length ?? wide) * product(spec.shape.slice(2));
}

/** Return the number of values that cross the wire under a mask. */
export function countValues(manifest, mask) {
  return mask === null ? manifest.sharedValues : sum(manifest.shared.map((spec) => sizeOf(manifest, spec, mask)));
}

/** Return the active values of the shared tensors, Map name -> Float32Array, as one vector. */
export function pack(manifest, tensors, mask) {
  const packed = new Float32Array(countValues(manifest, mask));
  eachBlock(manifest, mask, (spec, places, begin, end) => {
    const tensor = tensors.get(spec.name);
    if (places === null) packed.set(tensor, begin);
    else for (let i = begin; i < end; i++) packed[i] = tensor[places[i - begin]];
  });
  return packed;
}

/** Overwrite the active values of `tensors` with packed ones; other values stay. */
export function mergeInPlace(manifest, tensors, packed, mask) {
  eachBlock(manifest, mask, (spec, places, begin, end) => {
    const tensor = tensors.get(spec.name);
    if (places === null) tensor.set(packed.subarray(begin, end));
    else for (let i = begin; i < end; i++) tensor[places[i - begin]] = packed[i];
  });
}

/** Call `visit(spec, places, begin, end)` for each shared tensor: its places, and its part of the packed vector. */
export function eachBlock(manifest, mask, visit) {
  let begin = 0;
  for (const spec of manifest.shared) {
    const places = placesOf(manifest, spec, mask);
    const end = begin + (places?.length ?? spec.size);
    visit(spec, places, begin, end);
    begin = end;
  }
}

/** Return one bit per neuron, in manifest order, most significant bit first. */
export function neuronBits(manifest, mask) {
  const bits = new Uint8Array(Math.ceil(sum([...manifest.groups.values()]) / 8));
  let start = 0;
  for (const [group, size] of manifest.groups) {
    for (const neuron of mask.get(group)) bits[(start + neuron) >> 3] |= 128 >> ((start + neuron) & 7);
    start += size;
  }
  return bits;
}

/** Return the mask of these bits. Throws ProtocolError if they do not fit this model. */
export function neuronsFromBits(manifest, bits) {
  const total = sum([...manifest.groups.values()]);
  const set = (place) => Boolean(bits[place >> 3] & (128 >> (place & 7)));
  if (bits.length !== Math.ceil(total / 8)) throw new ProtocolError(`the mask has ${bits.length} bytes, which do not fit ${total} neurons`);
  for (let place = total; place < 8 * bits.length; place++) {
    if (set(place)) throw new ProtocolError("the mask's padding bits must be zero");
  }
  const mask = new Map();
  let start = 0;
  for (const [group, size] of manifest.groups) {
    const begin = start;
    mask.set(group, Int32Array.from({ length: size }, (_, index) => index).filter((index) => set(begin + index)));
    start += size;
  }
  checkMask(manifest, mask);
  return mask;
}
