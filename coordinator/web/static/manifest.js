/** The federation's model as data: `sparrow/protocol/manifest.py`, which describes each field. */
import { ProtocolError } from "./errors.js";
import { Generator } from "./pcg64.js";
import { hex, sha256, utf8 } from "./sha256.js";

/** Bytes of the largest manifest, and of the largest ONNX graph, that are accepted. */
export const MAX_MANIFEST = 16 * 1024 * 1024;
export const MAX_GRAPH = 16 * 1024 * 1024;
/** Bytes of all tensors and of one sample, and neurons of all groups, that are accepted. */
const MAX_MODEL_BYTES = 2 ** 32, MAX_SAMPLE_BYTES = 2 ** 28, MAX_NEURONS = 2 ** 20, MAX_SIZE = 2 ** 31;
const MOST_COLUMNS = 10_000, MOST_CATEGORIES = 1_000, MOST_CLASSES = 10_000, MOST_SPARE = 1_000, LONGEST_NAME = 200;
const FILES = ["skeleton", "step", "evaluation", "preparation", "frozen", "first"];
const ARRAYS = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array, bool: Uint8Array };
const POLICIES = ["shared", "personal", "dropped", "frozen"];
const MULTIPLYING = new Set(["linear", "conv1d", "conv2d", "conv3d"]);
/** Kinds of layers whose FLOPs are known. */
export const COUNTED = new Set([
  ...MULTIPLYING, "rnn", "gru", "lstm", "rnncell", "grucell", "lstmcell", "multiheadattention",
  "convtranspose1d", "convtranspose2d", "convtranspose3d",
]);

/**
 * A checked manifest. `tensors` are specs {name, shape, size, dtype, policy, trainable, axes, init}; `groups` a Map of
 * neuron groups to their sizes; `preparation` { reader, free, rate, step, dtype, shape, axes, columns, own } of raw
 * samples and `targets` { kind, column, names, spare } of outputs, null for a model without; `said` its JSON. Throws
 * ProtocolError for any other text.
 */
export class Manifest {
  constructor(text) {
    const said = checked(text);
    this.said = said;
    this.digest = hex(sha256(utf8(text)));
    this.task = said.task;
    this.inputShape = said.input_shape;
    this.outputShape = said.output_shape;
    this.groups = new Map(said.groups.map((group) => [group.name, group.size]));
    this.layers = said.layers;
    this.tensors = said.tensors.map((tensor) => ({ ...tensor, size: product(tensor.shape) }));
    this.frozenPrecision = said.frozen_precision;
    this.preparation = said.preparation ? described(said.preparation) : null;
    this.targets = said.targets ? meaning(said.targets) : null;
    this.files = new Map();
    for (const name of FILES) if (said[`${name}_sha256`] != null) this.files.set(name, said[`${name}_sha256`]);
    this.shared = this.of("shared");
    this.kept = this.tensors.filter((spec) => spec.policy === "shared" || spec.policy === "personal");
    this.frozen = this.of("frozen");
    this.first = this.of("personal").filter((spec) => spec.init.kind === "data");
    this.sharedValues = sum(this.shared.map((spec) => spec.size));
    this.valuesDigest = valuesDigest(said);
  }

  /** SHA-256 of the description of samples, raw or prepared, and of their classes; null without a description. */
  get samplesDigest() {
    const { preparation, targets } = this;
    if (!preparation && !targets) return null;
    // Rows and arrays had no other fields in earlier versions; samples that browsers kept then stay valid.
    const { reader, free, rate, step, ...plain } = preparation ?? {};
    const form = preparation && (["rows", "arrays"].includes(reader) ? plain : preparation);
    return hex(sha256(utf8(JSON.stringify([form, targets]))));
  }

  /** The last layer's bias, one value for each output, if it is trained and crosses the wire; else undefined. */
  get outputBias() {
    const names = this.layers.at(-1)?.tensors ?? [];
    const fits = ({ name, shape, trainable }) => trainable && names.includes(name) && String(shape) === String(this.outputShape);
    return this.shared.find(fits);
  }

  /** Return the tensors of a policy, in their order. */
  of(policy) {
    return this.tensors.filter((spec) => spec.policy === policy);
  }
}

/** Return the product of numbers, and their sum. */
export const product = (numbers) => numbers.reduce((all, each) => all * each, 1);
export const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);

/** Return an array of zeros for a tensor. */
export const zeros = (spec) => new ARRAYS[spec.dtype](spec.size);

/**
 * Return the first values of every tensor that stays on the device (`own_initial_values`), Map name -> array.
 * published: those of the file `first`.
 */
export function ownInitialValues(manifest, seed, published) {
  return new Map(manifest.of("personal").map((spec) => [spec.name, initial(spec, seed, published)]));
}

function initial(spec, seed, published) {
  if (spec.init.kind === "data") {
    if (!published.has(spec.name)) throw new ProtocolError(`${spec.name}: the initial values are not published`);
    return published.get(spec.name).slice();
  }
  const values = zeros(spec);
  if (spec.init.kind === "constant") return values.fill(spec.dtype === "int64" ? BigInt(spec.init.value) : spec.init.value);
  const key = sha256(utf8(`init|${seed}|${spec.name}`)).subarray(0, 16);
  const words = Generator.of(BigInt(`0x${hex(key)}`)).rawWords(spec.size);
  for (let i = 0; i < spec.size; i++) {
    const unit = (words[2 * i + 1] >>> 8) * 2 ** -24; // the top 24 of 64 bits; pairs are low, high
    values[i] = spec.init.bound * (2 * unit - 1);
  }
  return values;
}

/**
 * Return the tensors of a file of values (`protocol/values.py`), Map name -> array. which: "frozen" or "first".
 * Throws ProtocolError unless it is the file that the manifest names.
 */
export function unpackValues(manifest, which, file) {
  const stored = manifest[which].map((spec) => [spec, halved(manifest, which, spec)]);
  if (file.byteLength !== valuesSize(manifest, which) || hex(sha256(file)) !== manifest.files.get(which)) {
    throw new ProtocolError(`the file of ${which} values does not match its digest in the manifest`);
  }
  const found = new Map();
  let begin = 0;
  for (const [spec, half] of stored) {
    const bytes = spec.size * (half ? 2 : ARRAYS[spec.dtype].BYTES_PER_ELEMENT);
    const part = file.slice(begin, begin + bytes).buffer;
    found.set(spec.name, half ? fromHalf(new Uint16Array(part)) : new ARRAYS[spec.dtype](part));
    begin += bytes;
  }
  return found;
}

/** Return the bytes of a file of values. */
export function valuesSize(manifest, which) {
  const width = (spec) => (halved(manifest, which, spec) ? 2 : ARRAYS[spec.dtype].BYTES_PER_ELEMENT);
  return sum(manifest[which].map((spec) => spec.size * width(spec)));
}

const halved = (manifest, which, spec) =>
  which === "frozen" && manifest.frozenPrecision === "float16" && spec.dtype === "float32" && spec.shape.length > 1;

/** Return float16 numbers, given as their bits, as float32. */
export function fromHalf(bits) {
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const sign = bits[i] & 0x8000 ? -1 : 1, exponent = (bits[i] >> 10) & 31, fraction = bits[i] & 1023;
    if (exponent === 31) values[i] = fraction ? NaN : sign * Infinity;
    else values[i] = sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : (fraction / 1024) * 2 ** -14);
  }
  return values;
}

/** Return a manifest's JSON. Throws ProtocolError if it does not describe a model. */
function checked(text) {
  let said = null;
  try {
    said = JSON.parse(text);
    pythonJson(said); // no deeper than it can be written again
  } catch {
    said = null;
  }
  if (said?.version !== 1) throw unreadable();
  const groups = new Map(records(said.groups).map(({ name, size }) => [name, size]));
  const sound = groups.size === said.groups.length && [...groups].every(([name, size]) => isText(name) && isSize(size))
    && isText(said.task) && isShape(said.input_shape) && isShape(said.output_shape)
    && ["float32", "float16"].includes(said.frozen_precision)
    && FILES.map((name) => said[`${name}_sha256`]).every((each) => each == null || (isText(each) && /^[0-9a-f]{64}$/.test(each)));
  if (!sound || !isDescribed(said)) throw unreadable();
  const names = new Set();
  for (const spec of records(said.tensors)) {
    if (names.has(spec.name) || !isUsable(spec, groups)) {
      throw new ProtocolError(`the manifest's tensor ${JSON.stringify(spec.name)?.slice(0, 80)} cannot be used`);
    }
    names.add(spec.name);
  }
  if (!names.size || sum([...groups.values()]) > sum(said.tensors.map(({ shape }) => sum(shape)))) throw unreadable();
  checkBytes(said);
  for (const { kind, positions, tensors } of records(said.layers)) {
    const known = isText(kind) && isSize(positions) && Array.isArray(tensors) && tensors.every((name) => names.has(name));
    if (!known) throw unreadable();
  }
  return said;
}

/** Throw ProtocolError for a model with too many bytes or neurons for a page. */
function checkBytes({ tensors, groups, input_shape, output_shape, preparation }) {
  const bytes = ({ dtype, shape }) => product(shape) * ARRAYS[dtype].BYTES_PER_ELEMENT;
  const raw = isShape(preparation?.shape) ? product(preparation.shape) * Number(/\d*$/.exec(preparation.dtype)[0]) / 8 : 0;
  const tooLarge = sum(tensors.map(bytes)) > MAX_MODEL_BYTES || sum(groups.map(({ size }) => size)) > MAX_NEURONS
    || Math.max(product(input_shape) * 8, product(output_shape) * 8, raw) > MAX_SAMPLE_BYTES;
  if (tooLarge) throw new ProtocolError("the manifest describes a model that is too large for a page; publish a smaller model");
}

/** Return whether the graph of a preparation is described, and each output has a name. */
function isDescribed({ preparation, preparation_sha256: digest, targets, output_shape: [outputs] }) {
  if ([preparation, targets].some((each) => each != null && (typeof each !== "object" || Array.isArray(each)))) return false;
  return (preparation == null) === (digest == null)
    && (!targets?.names?.length || targets.names.length + (targets.spare ?? 0) === outputs);
}

const unreadable = () =>
  new ProtocolError("the manifest cannot be read; reload this page, which may be out of date");

const isText = (value) => typeof value === "string";
const isSize = (value) => Number.isInteger(value) && value >= 1 && value <= MAX_SIZE;
const isShape = (value) => Array.isArray(value) && value.every(isSize);

function records(list) {
  if (Array.isArray(list) && list.every((each) => each !== null && typeof each === "object")) return list;
  throw unreadable();
}

function isUsable({ name, shape, dtype, policy, trainable, axes, init }, groups) {
  return isText(name) && isText(dtype) && Object.hasOwn(ARRAYS, dtype) && POLICIES.includes(policy)
    && typeof trainable === "boolean" && isShape(shape)
    && (policy !== "shared" || dtype === "float32") && isRecipe(init, dtype) && areAxes(axes, shape, groups)
    && (policy !== "frozen" || (!trainable && axes.every((segments) => !segments.length)));
}

function isRecipe(init, dtype) {
  const given = init?.kind === "uniform" ? init.bound : init?.value;
  const number = typeof given === "number" && Number.isFinite(Math.fround(given));
  if (init?.kind === "uniform") return number && given >= 0 && dtype === "float32";
  return init?.kind === "data" || (init?.kind === "constant" && number && (dtype !== "int64" || Number.isInteger(given)));
}

const READERS = ["rows", "arrays", "images", "audio", "recordings"];
const DTYPES = ["float32", "uint8", "int8", "uint16", "int16", "int32", "int64"];

/** Return the page's part of a preparation's description (`sparrow/protocol/preparation.py`). Throws ProtocolError. */
function described({
  reader = "arrays", free = [], rate = null, step = null, dtype = "float32", shape, axes = "", columns = [], own = false,
}) {
  const sound = READERS.includes(reader) && isBelow(rate, 1e6) && isBelow(step, 86_400) && DTYPES.includes(dtype) && isShape(shape) && shape.length <= 7
    && Array.isArray(free) && free.every((axis) => Number.isInteger(axis) && axis >= 0 && axis < shape.length)
    && new Set(free).size === free.length
    && isText(axes) && /^[A-Z]{0,7}$/.test(axes) && typeof own === "boolean"
    && records(columns).length <= MOST_COLUMNS && areNames(columns.map(({ name }) => name), MOST_COLUMNS)
    && columns.every(({ categories = [] }) => areNames(categories, MOST_CATEGORIES))
    && (!columns.length || (dtype === "float32" && shape.length === 1 && shape[0] === columns.length));
  if (!sound) throw new ProtocolError("the manifest's preparation cannot be used; reload this page");
  const fields = columns.map(({ name, categories = [] }) => ({ name, categories }));
  return { reader, free, rate, step, dtype, shape, axes, own, columns: fields };
}

/** Return whether an optional number is null, or above 0 and at most this. */
const isBelow = (value, most) => value === null || (typeof value === "number" && value > 0 && value <= most);

/** Return the page's part of the description of outputs. Throws ProtocolError. */
function meaning({ kind = "classes", column = null, names = [], spare = 0, numbered = false }) {
  const sound = ["classes", "numbers"].includes(kind) && (column === null || isName(column)) && areNames(names, MOST_CLASSES)
    && typeof numbered === "boolean" && Number.isInteger(spare) && spare >= 0 && spare <= MOST_SPARE && (kind === "classes" || !(names.length || spare));
  if (!sound) throw new ProtocolError("the manifest's targets cannot be used; reload this page");
  return { kind, column, names, spare, numbered };
}

const isName = (text) => isText(text) && text !== "" && !text.includes("\0") && [...text].length <= LONGEST_NAME;
const areNames = (list, most) =>
  Array.isArray(list) && list.length <= most && list.every(isName) && new Set(list).size === list.length;

/** Return whether the length of each axis matches its neurons. */
function areAxes(axes, shape, groups) {
  if (!Array.isArray(axes) || (axes.length && axes.length !== shape.length)) return false;
  return axes.every((segments, axis) => {
    if (!Array.isArray(segments)) return false;
    const lengths = segments.map((each) => (isSize(each?.repeat) ? groups.get(each.group) * each.repeat : NaN));
    return !segments.length || (axis < 2 && sum(lengths) === shape[axis]);
  });
}

/** SHA-256 of the names, shapes and neurons of the values, as Python's json.dumps(sort_keys=True) writes them. */
function valuesDigest(said) {
  const { layers, skeleton_sha256, step_sha256, evaluation_sha256, first_sha256, metrics, preparation, targets, ...model } =
    said;
  const tensors = model.tensors.map(({ init, ...spec }) => spec);
  return hex(sha256(utf8(pythonJson({ frozen_sha256: null, ...model, tensors }))));
}

/** Return JSON as Python writes it, with sorted keys and only ASCII. compact: without spaces. */
export function pythonJson(value, compact = false) {
  const [comma, colon] = compact ? [",", ":"] : [", ", ": "];
  const write = (each) => {
    if (Array.isArray(each)) return `[${each.map(write).join(comma)}]`;
    if (each !== null && typeof each === "object") {
      return `{${Object.keys(each).sort().map((key) => quoted(key) + colon + write(each[key])).join(comma)}}`;
    }
    return typeof each === "string" ? quoted(each) : JSON.stringify(each);
  };
  return write(value);
}

const quoted = (text) =>
  JSON.stringify(text).replace(/[\u007f-\uffff]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
