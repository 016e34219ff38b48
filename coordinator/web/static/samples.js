/** A device's samples: checked, split, put on the scale that the task's network takes, and dealt out in batches. */

import { readArrays } from "./arrays.js";
import { readRows } from "./columns.js";
import { DataError } from "./errors.js";
import { classOrder, classesIn, listed, outputsOf } from "./labels.js";
import { RandomState } from "./mt19937.js";
import { Generator } from "./pcg64.js";

/** Samples per batch where no gradient is kept. */
export const EVALUATION_BATCH = 32;

// --- splitting ---------------------------------------------------------------------------------------------------

const HELD_OUT = 0.3; // share of all samples that only reports see
const VALIDATION = 0.15; // share of the rest

/**
 * Split `count` samples at random, as every Sparrow device does: 0.595 to train, 0.105 to validate, 0.3 to test.
 *
 * seed: a whole number 0 .. 2^63 - 1, a BigInt where it may exceed 2^53. runs: the unbroken recording that each sample is
 * of, which is in one part as a whole, or null. Returns { train, validation, test }, sorted indices (Int32Array), at least
 * one each. Throws DataError for fewer than three samples, or recordings.
 */
export function split(count, seed, runs = null) {
  const number = BigInt(seed);
  if (number < 0n || number >= 2n ** 63n) throw new RangeError(`seed is ${seed}; give an integer from 0 to 2^63-1`);
  const groups = new Map();
  for (let i = 0; i < count; i++) {
    const run = runs ? runs[i] : i;
    if (!groups.has(run)) groups.set(run, []);
    groups.get(run).push(i);
  }
  const members = [...groups].sort(([one], [other]) => one - other).map(([, places]) => places);
  if (members.length < 3) {
    const what = runs ? "unbroken recordings (run)" : "samples";
    throw new DataError(`${members.length} ${what} cannot be split into training, validation and test; give 3 or more`);
  }
  const order = RandomState.of([Number(number & 0xffffffffn), Number(number >> 32n)]).permutation(members.length);
  const ends = [];
  for (const group of order) ends.push((ends.at(-1) ?? 0) + members[group].length);
  // The 1e-9 removes accidents of binary floats: (1 - 0.3) * 10 is 7, not 6.999...
  const within = (samples) => ends.filter((end) => end <= samples + 1e-9).length;
  const local = Math.min(Math.max(within((1 - HELD_OUT) * count), 2), order.length - 1);
  const kept = Math.min(Math.max(within(VALIDATION * ends[local - 1]), 1), local - 1);
  const places = (from, to) => Int32Array.from(Array.from(order.slice(from, to), (group) => members[group]).flat()).sort();
  return { train: places(kept, local), validation: places(0, kept), test: places(local, order.length) };
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
 * The samples of a table as `readTable` returns it, split by `seed`.
 *
 * source: the file's name. preparation, targets: the manifest's, or null; without preparation a sample has the model's
 * `inputShape`, and values are taken as they are, except for those of a `task` that `SCALES` knows. outputs: how many there
 * are. Returns { train, validation, test, names, said }, each part { inputs, targets: Int32Array [count], count } or null;
 * names: of all outputs, null if the federation has none; said: what was read, in one line. Throws DataError.
 */
export function fromTable(table, source, { preparation, targets, inputShape, outputs, seed, task = "" }) {
  const rows = readRows(table, source, { preparation, targets, inputShape });
  const labels = classesIn(rows.labels, { known: targets?.names, at: rows.at, decimal: table.decimal, said: rows.said });
  const { numbers, names } = outputsOf(labels, { source, targets, outputs });
  const inputs = preparation ? rows.inputs : brought(task, [{ values: rows.inputs, bytes: false }], inputShape)[0];
  const parts = parted({ inputs, targets: numbers, count: numbers.length }, null, seed, rows.runs);
  const read = { things: "rows", label: rows.label, labels, each: `columns ${listed(rows.columns)}` };
  const said = [...taken(names, targets), ...several(rows.people), ...rows.said];
  return { ...parts, names, said: lineOf(source, parts, { ...read, said }) };
}

/**
 * The samples of an npz file's arrays, as `readArchive` returns them: x_train [N, ...] and y_train [N], perhaps x_val and
 * y_val, x_test and y_test; or x and y. classes: their number, or their names in order. run: see `split`.
 *
 * Without validation and test the training samples are split by `seed`; with test only, validation is split off; with
 * validation only it serves for reports too, and test is null. Without preparation, pictures [N, H, W] get their channel and
 * bytes go to [0, 1], or to the scale of a `task` that `SCALES` knows. The rest as for `fromTable`.
 */
export function fromArchive(arrays, source, { preparation, targets, inputShape, outputs, seed, task = "" }) {
  const read = readArrays(arrays, source, { preparation, targets, inputShape, outputs });
  if (!preparation) {
    const uses = [...read.uses.values()], inputs = brought(task, uses.map((use) => use.inputs), inputShape);
    uses.forEach((use, at) => (use.inputs = inputs[at]));
  }
  return inParts({ ...read, source, label: "y" }, { targets, outputs, seed });
}

/**
 * The samples of a folder of pictures or sounds, as `readFolder` returns it: its parts, or split by `seed`. The rest as for
 * `fromTable`, but that the inputs of a part are an array of samples, each as it is kept.
 */
export function fromFolder(read, { targets, outputShape }, seed) {
  return inParts({ ...read, label: "class" }, { targets, outputs: outputShape.at(-1), seed });
}

function inParts({ source, uses, label, each, said }, { targets, outputs, seed }) {
  const all = [...uses.values()].flatMap(({ labels }) => labels);
  const { numbers, names } = outputsOf(all, { source, targets, outputs });
  const found = {};
  let begin = 0;
  for (const [use, { inputs, labels }] of uses) {
    found[use] = { inputs, targets: numbers.slice(begin, begin + labels.length), count: labels.length };
    begin += labels.length;
  }
  const [, main] = [...uses][0], train = found.train ?? found[""], { val: validation = null, test = null } = found;
  const parts = validation ? { train, validation, test } : parted(train, test, seed, main.runs);
  const remarks = [...taken(names, targets), ...several(main.people), ...said];
  const read = { things: "samples", label, labels: all, each, said: remarks };
  return { ...parts, names, said: lineOf(source, parts, read) };
}

/** Return a remark on a file of several people, all used as this device's. */
const several = (people) => (people > 1 ? [`it has ${people} people, all used as this device's`] : []);

/** Return a remark on the spare outputs that took names of this file, if any did. */
function taken(names, targets) {
  const own = names ? names.slice(targets.names.length).filter((name) => name) : [];
  return own.length ? [`spare outputs are used for ${listed(own)}, which the federation does not name`] : [];
}

/** One line about a file: samples, split, classes with counts, columns or shape, and what was left out. */
function lineOf(source, { train, validation, test }, { things, label, labels, each, said }) {
  const count = (number) => number.toLocaleString("en"), counts = new Map();
  for (const name of labels) counts.set(name, (counts.get(name) ?? 0) + 1);
  const split = `${count(train.count)} train, ${count(validation.count)} check, ${count((test ?? validation).count)} test`;
  const classes = listed(classOrder(labels).map((name) => `${name} ${count(counts.get(name))}`));
  return [`${source}: ${count(labels.length)} ${things} (${split})`, `${label}: ${classes}`, each, ...said].join("; ");
}

/** `train` in three parts; or in two beside its `test` part: what would have been held out is trained on then. */
function parted(train, test, seed, runs = null) {
  const parts = split(train.count, seed, runs);
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

/** Rows of `width` values at `index`, one after another, in an array of the same type; of samples in an array these. */
export function gathered(values, width, index) {
  if (Array.isArray(values)) return Array.from(index, (place) => values[place]);
  const found = new values.constructor(index.length * width);
  index.forEach((row, i) => found.set(values.subarray(row * width, (row + 1) * width), i * width));
  return found;
}

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
    if (count < 1) throw new DataError("no samples; give at least one");
    if (!(batchSize >= 1)) throw new DataError(`batch size ${batchSize}; give at least 1`);
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

const size = (shape) => shape.reduce((product, length) => product * length, 1);
