/** A device's samples: checked, split, put on the scale that the task's network takes, and dealt out in batches. */

import { RandomState } from "./mt19937.js";
import { Generator } from "./pcg64.js";

/** Data of the user that cannot be used; the text says what was met, what was wanted and what to do. */
export class DataError extends Error {
  name = "DataError";
}

/** Samples per batch where no gradient is kept. */
export const EVALUATION_BATCH = 32;

const SAME_CLASSES =
  "every device's file must agree on the number of classes: add the entry 'classes' to it, their number or their " +
  "names in order, as in numpy.savez(path, x_train=x, y_train=y, classes=10)";

// --- splitting ---------------------------------------------------------------------------------------------------

const HELD_OUT = 0.3; // share of all samples that only reports see
const VALIDATION = 0.15; // share of the rest

/**
 * Split `count` samples at random, as every Sparrow device does: 0.595 to train, 0.105 to validate, 0.3 to test.
 *
 * seed: a whole number 0 .. 2^63 - 1, a BigInt where it may exceed 2^53. Returns { train, validation, test }, sorted
 * indices (Int32Array), at least one each. Throws DataError for fewer than three samples.
 */
export function split(count, seed) {
  const number = BigInt(seed);
  if (number < 0n || number >= 2n ** 63n) throw new RangeError(`the seed is ${seed}; it must lie in 0..2^63-1`);
  if (count < 3) {
    throw new DataError(`${count} samples cannot be split into training, validation and test; give at least 3`);
  }
  const order = RandomState.of([Number(number & 0xffffffffn), Number(number >> 32n)]).permutation(count);
  // The 1e-9 removes accidents of binary floats: (1 - 0.3) * 10 is 7, not 6.999...
  const local = Math.min(Math.max(Math.floor((1 - HELD_OUT) * count + 1e-9), 2), count - 1);
  const kept = Math.min(Math.max(Math.floor(VALIDATION * local + 1e-9), 1), local - 1);
  return {
    train: order.slice(kept, local).sort(),
    validation: order.slice(0, kept).sort(),
    test: order.slice(local).sort(),
  };
}

/** `split` of samples that were drawn, photographed or recorded here. */
export function splitAdded(count, seed) {
  if (count < 3) throw new DataError(`there are ${count} samples here; add at least ${3 - count} more to take part`);
  return split(count, seed);
}

// --- scales ------------------------------------------------------------------------------------------------------

const greyLevels = (...shares) => shares.map((share) => 255 * share);

const CIFAR10 = { mean: greyLevels(0.4914, 0.4822, 0.4465), deviation: greyLevels(0.2023, 0.1994, 0.201) };
const MNIST = { mean: greyLevels(0.1307), deviation: greyLevels(0.3081) };
const CIFAR10_HALF = { mean: greyLevels(0.5, 0.5, 0.5), deviation: greyLevels(0.5, 0.5, 0.5) };

/**
 * Map of a task's name, with or without its network's, to { mean, deviation }: one entry each per channel, in the units
 * of stored samples (grey levels 0..255, or the sensor's own). The network takes (x - mean) / deviation.
 */
export const SCALES = new Map([
  ["mnist", MNIST],
  ["emnist", { mean: [0], deviation: [255] }],
  ["emnist:leaf", MNIST],
  ["femnist", MNIST],
  ["cifar10", CIFAR10_HALF],
  ["cifar10:fedspu", CIFAR10_HALF],
  ["cifar10:fedsgc", CIFAR10],
  ["cifar10:dmpfl", CIFAR10],
  ["cifar10:pfedgate", CIFAR10],
  ["cifar100", CIFAR10],
  ["pacs", { mean: greyLevels(0.485, 0.456, 0.406), deviation: greyLevels(0.229, 0.224, 0.225) }],
  [
    "har",
    {
      mean: [-5.0153, -1.5459, 0.2286, -0.0026, 0.0153, 0.0223],
      deviation: [5.2587, 6.4453, 4.0262, 1.397, 1.2346, 1.0315],
    },
  ],
  [
    "uci_har",
    {
      mean: [-0.0007, -0.0003, -0.0002, -0.0034, -0.0002, 0.0009, 0.8083, 0.0218, 0.0848],
      deviation: [0.1919, 0.1219, 0.1038, 0.4039, 0.3705, 0.254, 0.412, 0.3973, 0.3443],
    },
  ],
  ["shakespeare", { mean: Array(80).fill(0), deviation: Array(80).fill(1) }],
]);

const scaleOf = (task) => SCALES.get(task) ?? SCALES.get(task.split(":")[0]);

/** (x - mean) / deviation in float32, channel by channel of samples [n, channels, ...]. */
function standardised({ mean, deviation }, values, inputShape) {
  const [channels, ...rest] = inputShape;
  const middle = Float32Array.from(mean);
  const spread = Float32Array.from(deviation);
  const each = size(rest);
  return values.map((value, i) => {
    const channel = Math.floor(i / each) % channels;
    return Math.fround(value - middle[channel]) / spread[channel];
  });
}

/**
 * What the task's network takes of one sample or several: pictures in grey levels 0..255 [C, H, W], or a record of
 * sensors in their own units [channels, steps], as Float32Array. Returns another Float32Array of the same length.
 */
export function scaled(task, values, inputShape) {
  const scale = scaleOf(task);
  if (scale) return standardised(scale, values, inputShape);
  return inputShape.length === 3 ? values.map((value) => value / 255) : values.slice();
}

const isGreyLevel = (value) => value >= 0 && value <= 255 && Number.isInteger(value);

/**
 * `parts`, each { values, bytes: whether they are stored as bytes }, on the scale of the task: an array of each. Bytes
 * go to [0, 1]; what is in the units of the task's own scale goes there: all sensors' values, and grey levels.
 */
function brought(task, parts, inputShape) {
  const known = scaleOf(task) !== undefined;
  const stored = inputShape.length !== 3 || parts.every(({ values, bytes }) => bytes || values.every(isGreyLevel));
  if (known && stored) return parts.map(({ values }) => scaled(task, values, inputShape));
  return parts.map(({ values, bytes }) => (bytes ? values.map((value) => value / 255) : values));
}

// --- files -------------------------------------------------------------------------------------------------------

/**
 * The samples of a device's own file.
 *
 * arrays: Map as `readArchive` returns: x_train [N, ...] and y_train [N], perhaps x_val and y_val, x_test and y_test,
 * perhaps classes; or x and y. Without validation and test the training samples are split by `seed`; with test alone,
 * validation is split off; with validation alone it serves for reports too, and test is null. Pictures [N, H, W] get
 * their channel; bytes go to [0, 1], or to the scale of a `task` that `SCALES` knows.
 *
 * inputShape: of one sample. classes: how many there are. Returns { train, validation, test }, each { inputs:
 * Float32Array [count * size], targets: Int32Array [count], count }. Throws DataError.
 */
export function fromArchive(arrays, { inputShape, classes, seed, task = "" }) {
  const bare = !["x_train", "y_train"].some((key) => arrays.has(key)) && ["x", "y"].some((key) => arrays.has(key));
  const main = bare ? "" : "_train";
  const uses = [main, ...["_val", "_test"].filter((use) => arrays.has(`x${use}`) || arrays.has(`y${use}`))];
  const pairs = new Map(uses.map((use) => [use, pair(arrays, use)]));
  for (const [use, { shape }] of pairs) {
    const first = pairs.get(main).shape;
    if (!same(shape, first)) {
      throw new DataError(
        `x${use}: samples have shape ${tuple(shape)}, those of x${main} ${tuple(first)}; they must be alike`,
      );
    }
  }
  checkClasses(arrays, pairs, classes);
  for (const [use, { shape, stored, labels }] of pairs) {
    if (!same(shape, inputShape) && !same(stored, inputShape)) throw otherShape(`x${use}`, shape, inputShape);
    checkBelow(`y${use}`, labels, classes);
  }
  const inputs = brought(task, [...pairs.values()], inputShape);
  const [train, validation, test] = [main, "_val", "_test"].map((use) => {
    const at = uses.indexOf(use);
    if (at < 0) return null;
    const targets = Int32Array.from(pairs.get(use).labels);
    return { inputs: inputs[at], targets, count: targets.length };
  });
  return validation ? { train, validation, test } : parted(train, test, seed);
}

/**
 * The samples of a table's rows, split by `seed`; a row's values are those of a sample in order.
 *
 * table: as `readTable` returns. The rest as for `fromArchive`; values are taken as they are, but for those of a `task`
 * that `SCALES` knows.
 */
export function fromTable(table, { inputShape, classes, seed, task = "" }) {
  const { inputs, features, labels } = table;
  if (labels.length === 0) throw new DataError("the table has no rows; give at least one sample");
  if (features !== size(inputShape)) throw otherShape("the table", [features], inputShape);
  checkFinite("the table", inputs);
  const numbers = numberClasses(labels, classes);
  checkFrom0("the table", numbers);
  checkBelow("the table", numbers, classes);
  const [values] = brought(task, [{ values: inputs, bytes: false }], inputShape);
  return parted({ inputs: values, targets: Int32Array.from(numbers), count: labels.length }, null, seed);
}

/** `train` in three parts; or in two beside its `test` part: what would have been held out is trained on then. */
function parted(train, test, seed) {
  const parts = split(train.count, seed);
  const index = test ? Int32Array.from([...parts.train, ...parts.test]).sort() : parts.train;
  return {
    train: choose(train, index),
    validation: choose(train, parts.validation),
    test: test ?? choose(train, parts.test),
  };
}

/** The samples at `index`, in its order. */
function choose({ inputs, targets, count }, index) {
  return {
    inputs: gathered(inputs, inputs.length / count, index),
    targets: gathered(targets, targets.length / count, index),
    count: index.length,
  };
}

/** Rows of `width` values at `index`, one after another, in an array of the same type. */
function gathered(values, width, index) {
  const found = new values.constructor(index.length * width);
  index.forEach((row, i) => found.set(values.subarray(row * width, (row + 1) * width), i * width));
  return found;
}

/** The samples and labels of one use, checked: { values, bytes, shape (with a channel), stored (without), labels }. */
function pair(arrays, use) {
  const inputs = wanted(arrays, `x${use}`);
  const labels = wanted(arrays, `y${use}`);
  if (!same(labels.shape, inputs.shape.slice(0, 1)) || labels.shape[0] === 0) {
    throw new DataError(
      `y${use}: has shape ${tuple(labels.shape)} beside x${use} of ${tuple(inputs.shape)}; give one whole number per ` +
        "sample (for one-hot rows: y.argmax(axis=1)), and at least one sample",
    );
  }
  if (!"iu".includes(labels.type[0])) {
    throw new DataError(
      `y${use}: is of ${typeName(labels.type)}; number the classes from 0 and store them as int64`,
    );
  }
  checkFrom0(`y${use}`, labels.data);
  const values = asFloats(inputs, `x${use}`);
  const stored = inputs.shape.slice(1);
  const shape = stored.length === 2 ? [1, ...stored] : stored;
  return { values, bytes: inputs.type === "u1", shape, stored, labels: labels.data };
}

function wanted(arrays, key) {
  if (arrays.has(key)) return arrays.get(key);
  const met = [...arrays.keys()].sort().join(", ") || "nothing";
  throw new DataError(`the file holds ${met}, but no ${key}; add it`);
}

/** An array's values in float32. */
function asFloats({ shape, type, data }, key) {
  if (!"fiub".includes(type[0])) {
    throw new DataError(`${key}: is of ${typeName(type)}; store numbers, best float32 or, for images, uint8`);
  }
  if (shape.length < 2 || shape.length > 4 || shape.includes(0)) {
    throw new DataError(
      `${key}: has shape ${tuple(shape)}; give features [N,F] or images [N,H,W] or [N,C,H,W]`,
    );
  }
  if (shape.length === 4 && [1, 3].includes(shape[3]) && Math.min(shape[1], shape[2]) >= 8) {
    throw new DataError(
      `${key}: has shape ${tuple(shape)}, it seems with the channels last; store ${key}.transpose(0, 3, 1, 2)`,
    );
  }
  const values = data instanceof Float32Array ? data : new Float32Array(data);
  checkFinite(key, values);
  return values;
}

/** A decimal number that is written in `text`, NaN where there is none. */
export function asNumber(text) {
  return /^\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*$/i.test(text) ? Number(text) : NaN;
}

/** Classes that stand in a table as text: numbers as they are, names by their order, all of which must be there. */
function numberClasses(labels, classes) {
  const values = labels.map(asNumber);
  if (!values.some(Number.isNaN)) {
    if (values.every(Number.isInteger)) return values;
    throw new DataError("the table: a label is no whole number; number the classes from 0");
  }
  const names = [...new Set(labels)].sort(byCodePoints);
  if (names.length !== classes) {
    throw new DataError(
      `the table: has ${names.length} names of classes, the federation's model has ${classes} classes; ` +
        "number them from 0",
    );
  }
  const number = new Map(names.map((name, i) => [name, i]));
  return labels.map((label) => number.get(label));
}

/** Python's order of texts. JavaScript's own is that of 16-bit units, which differs for rare characters. */
function byCodePoints(one, other) {
  const [a, b] = [[...one], [...other]];
  const at = a.findIndex((character, i) => character !== b[i]);
  if (at < 0) return a.length - b.length;
  return at < b.length ? a[at].codePointAt(0) - b[at].codePointAt(0) : 1;
}

// --- checks ------------------------------------------------------------------------------------------------------

const size = (shape) => shape.reduce((product, length) => product * length, 1);

const same = (one, other) => one.length === other.length && one.every((length, i) => length === other[i]);

/** A shape as numpy writes it. */
const tuple = (shape) => (shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`);

const KINDS = { f: "float", i: "int", u: "uint", c: "complex" };

/** An array's type as numpy calls it, as far as that is worth it. */
function typeName(type) {
  if (type === "b1") return "bool";
  if (type[0] === "U" || type[0] === "S") return "text";
  return type[0] in KINDS ? `${KINDS[type[0]]}${8 * Number(type.slice(1))}` : `numpy's type ${type}`;
}

/** Labels for a message, each once: `label 7` or `labels 7, 9`; of many the first five. */
function labelNames(labels) {
  const found = [...new Set(labels)].sort((a, b) => a - b);
  const names = found.slice(0, 5).join(", ") + (found.length > 5 ? ", ..." : "");
  return `label${found.length > 1 ? "s" : ""} ${names}`;
}

function checkFinite(source, values) {
  if (values.every(Number.isFinite)) return;
  throw new DataError(
    `${source}: a value is missing or not finite in float32; replace or remove such samples`,
  );
}

function checkFrom0(source, labels) {
  const below = labels.filter((label) => label < 0);
  if (below.length) throw new DataError(`${source}: has ${labelNames(below)}; number the classes from 0`);
}

function checkBelow(source, labels, classes) {
  const beyond = labels.filter((label) => label >= classes);
  if (beyond.length === 0) return;
  throw new DataError(
    `${source}: has ${labelNames(beyond)} in ${beyond.length} of ${labels.length} samples, but the federation's ` +
      `model has ${classes} classes, 0 to ${classes - 1}; correct them or leave these samples out`,
  );
}

/** Refuse a file that says of itself how many classes there are, and is not of this federation. */
function checkClasses(arrays, pairs, classes) {
  if (!arrays.has("classes")) return;
  const { shape, type, data } = arrays.get("classes");
  const number = shape.length === 0 && "iu".includes(type[0]);
  if (!number && shape.length !== 1) {
    throw new DataError(
      `classes: has shape ${tuple(shape)} of ${typeName(type)}; give their number, or a list of their names`,
    );
  }
  const said = number ? data[0] : shape[0];
  if (said < 2) throw new DataError(`classes: there are ${said}, at least 2 are needed; ${SAME_CLASSES}`);
  for (const [use, { labels }] of pairs) {
    const beyond = labels.filter((label) => label >= said);
    if (beyond.length) {
      throw new DataError(
        `y${use}: has ${labelNames(beyond)}, but there are ${said} classes, 0 to ${said - 1}; ${SAME_CLASSES}`,
      );
    }
  }
  if (said !== classes) {
    throw new DataError(`classes: the file has ${said}, the federation's model ${classes}; ${SAME_CLASSES}`);
  }
}

const otherShape = (source, met, wanted) =>
  new DataError(
    `${source}: samples have shape ${tuple(met)}, the federation's model takes ${tuple(wanted)}; give samples of ` +
      "that shape",
  );

// --- batches -----------------------------------------------------------------------------------------------------

/**
 * Batches of samples: in their order (`for (const batch of batches)`), or `shuffled`; each { inputs: Float32Array
 * [count * size], targets: BigInt64Array of classes or Float32Array of values, count }.
 *
 * No sample is left out: the last batch may be smaller. Only a rest of a single sample joins the batch before it,
 * because batch norm cannot normalise one sample by itself.
 */
export class Batches {
  #samples;
  #batchSize;

  /** samples: { inputs, targets: Int32Array or Float32Array, count } with at least one sample. */
  constructor({ inputs, targets, count }, batchSize) {
    if (count < 1) throw new DataError("there are no samples; give at least one");
    if (!(batchSize >= 1)) throw new DataError(`the batch size is ${batchSize}; it must be at least 1`);
    const values = targets instanceof Int32Array ? BigInt64Array.from(targets, BigInt) : targets;
    this.#samples = { inputs, targets: values, count };
    this.#batchSize = batchSize;
  }

  /** Samples in one pass. */
  get count() {
    return this.#samples.count;
  }

  /** Their targets, in their order. */
  get targets() {
    return this.#samples.targets;
  }

  /** Batches in one pass. */
  get length() {
    const rest = this.count % this.#batchSize;
    return Math.max(1, Math.floor(this.count / this.#batchSize) + (rest > 1 ? 1 : 0));
  }

  /** One pass in the samples' order; the batches are views of all samples. */
  *[Symbol.iterator]() {
    const { inputs, targets, count } = this.#samples;
    const part = (values, start, stop) => {
      const width = values.length / count;
      return values.subarray(start * width, stop * width);
    };
    for (const [start, stop] of this.#bounds()) {
      yield { inputs: part(inputs, start, stop), targets: part(targets, start, stop), count: stop - start };
    }
  }

  /** One pass in an order drawn from `generator`, a Generator. */
  *shuffled(generator) {
    const order = generator.permutation(this.count);
    for (const [start, stop] of this.#bounds()) yield choose(this.#samples, order.subarray(start, stop));
  }

  *#bounds() {
    const last = this.length - 1;
    for (let number = 0; number <= last; number++) {
      const start = number * this.#batchSize;
      yield [start, number === last ? this.count : start + this.#batchSize];
    }
  }
}

/** The batches of one pass after another, without end, each pass in another order; `seed` as for `Generator.of`. */
export function* passes(batches, seed) {
  const generator = Generator.of(seed);
  for (;;) yield* batches.shuffled(generator);
}
