/**
 * Packed values on the wire: `sparrow/protocol/bundle.py`, for whole models and masks of neurons. Every length is checked
 * against the manifest before values are read.
 */
import { BundleError, ProtocolError, TrainingDiverged } from "./errors.js";
import { fromHalf, pythonJson, sum } from "./manifest.js";
import { checkMask, countValues, drawNeurons, neuronBits, neuronsFromBits } from "./masks.js";
import { Sha256, hex, utf8 } from "./sha256.js";

const MAX_HEADER = 64 * 1024;
const PARTS = ["values", "scales", "mask"];
const WIDTHS = { F32: 4, F16: 2, BF16: 2, I8: 1, U8: 1 };
const DTYPES = { fp32: "F32", fp16: "F16", bf16: "BF16", int8: "I8" };
const METADATA = ["manifest", "mask", "report", "sha256", "sparrow"];

/** Return an upper bound on the bytes of a payload of this model. */
export function largestPayload(manifest) {
  const neurons = 4 * sum([...manifest.groups.values()]) + 4 * manifest.groups.size;
  return 8 + MAX_HEADER + 4 * manifest.sharedValues + neurons;
}

/**
 * Return a payload (Uint8Array) as { values: Float32Array, mask: Map|null, parts }: finite values, as many as the mask
 * covers. Throws BundleError.
 */
export function decode(body, manifest) {
  const { header, start } = readHeader(body);
  const metadata = readMetadata(header);
  if (metadata.manifest !== manifest.valuesDigest) {
    throw new BundleError("the bundle was made for another model; reload this page");
  }
  const entries = new Map(PARTS.filter((name) => name in header).map((name) => [name, readEntry(header, name)]));
  checkLayout(entries, body.length - start);
  const data = new Map([...entries].map(([name, { low, high }]) => [name, body.subarray(start + low, start + high)]));
  if (digestOf(header, [...data.values()]) !== metadata.sha256) {
    throw new BundleError("the bundle's digest does not match its content");
  }
  if (data.has("scales")) throw new BundleError("the payload has scales, which only updates have");
  const mask = readMask(manifest, metadata.mask, data.get("mask"));
  const { dtype, count } = entries.get("values");
  const wanted = countValues(manifest, mask);
  if (count !== wanted) throw new BundleError(`the bundle has ${count} values, but its mask covers ${wanted}`);
  const values = fromBytes(data.get("values"), dtype);
  if (!values.every(Number.isFinite)) throw new BundleError("a value of the bundle is not finite");
  return { values, mask, parts: { header: start, ...Object.fromEntries([...data].map(([name, part]) => [name, part.length])) } };
}

/**
 * Return an update as a bundle, Uint8Array. values: Float32Array [n], or { numbers: Int8Array [n], scales: Float32Array
 * [rows] } in int8. draw: the draw of the mask. Throws TrainingDiverged for a value that is not finite in the
 * precision.
 */
export function encode(manifest, values, mask, { draw = null, precision = "fp32", report = "" } = {}) {
  const parts = new Map();
  if (precision === "int8") {
    parts.set("values", ["I8", values.numbers.length, new Uint8Array(values.numbers.buffer)]);
    parts.set("scales", ["F32", values.scales.length, toBytes(values.scales, "fp32")]);
  } else {
    parts.set("values", [DTYPES[precision], values.length, toBytes(values, precision)]);
  }
  const form = writeMask(manifest, mask, draw);
  if (form.bytes.length) parts.set("mask", ["U8", form.bytes.length, form.bytes]);
  const header = {
    __metadata__: { sparrow: "1", manifest: manifest.valuesDigest, mask: pythonJson(form.said, true), report },
  };
  let end = 0;
  for (const [name, [dtype, count, data]] of parts) {
    header[name] = { dtype, shape: [count], data_offsets: [end, end + data.length] };
    end += data.length;
  }
  const body = [...parts.values()].map(([, , data]) => data);
  header.__metadata__.sha256 = digestOf(header, body);
  const text = pythonJson(header, true);
  const head = utf8(text + " ".repeat((8 - (text.length % 8)) % 8));
  const bundle = new Uint8Array(8 + head.length + end);
  new DataView(bundle.buffer).setUint32(0, head.length, true);
  bundle.set(head, 8);
  let next = 8 + head.length;
  for (const data of body) {
    bundle.set(data, next);
    next += data.length;
  }
  return bundle;
}

function readHeader(body) {
  if (body.length < 8) throw new BundleError(`${body.length} bytes are too few for a bundle`);
  const view = new DataView(body.buffer, body.byteOffset, 8);
  const length = view.getUint32(0, true) + view.getUint32(4, true) * 2 ** 32;
  if (length > MAX_HEADER) throw new BundleError(`the header claims ${length} bytes; it must have at most ${MAX_HEADER}`);
  if (length > body.length - 8) throw new BundleError("the bundle is truncated: it ends within its header");
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(body.subarray(8, 8 + length)));
  } catch {
    throw new BundleError("the header is not JSON; a bundle is a safetensors file");
  }
  const named = isRecord(header) ? Object.keys(header) : [];
  const known = named.every((name) => name === "__metadata__" || PARTS.includes(name));
  if (!known || !named.includes("__metadata__") || !named.includes("values")) {
    throw new BundleError("the header must have __metadata__, values, and no entries other than parts of a bundle");
  }
  return { header, start: 8 + length };
}

const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function readMetadata({ __metadata__: metadata }) {
  const named = isRecord(metadata) ? Object.keys(metadata).sort() : [];
  if (named.join() !== METADATA.join() || !Object.values(metadata).every((each) => typeof each === "string")) {
    throw new BundleError("the metadata must have sparrow, manifest, mask, report and sha256 as text");
  }
  if (metadata.sparrow !== "1") throw new BundleError("this page cannot read the bundle's format; reload the page");
  return metadata;
}

function readEntry(header, name) {
  const entry = header[name];
  const sound = isRecord(entry) && Object.keys(entry).sort().join() === "data_offsets,dtype,shape"
    && typeof entry.dtype === "string" && entry.shape?.length === 1 && entry.data_offsets?.length === 2;
  const [count, low, high] = sound ? [entry.shape[0], ...entry.data_offsets] : [];
  if (!sound || ![count, low, high].every((each) => Number.isSafeInteger(each) && each >= 0)) {
    throw new BundleError(`${name}: the header must have a dtype, a shape of one number and two offsets`);
  }
  const allowed = name === "values" ? ["F32", "F16", "BF16"] : name === "mask" ? ["U8"] : ["F32"];
  if (!allowed.includes(entry.dtype)) throw new BundleError(`${name}: dtype ${entry.dtype.slice(0, 20)} is not accepted`);
  if (high - low !== count * WIDTHS[entry.dtype]) throw new BundleError(`${name}: ${count} values do not take ${high - low} bytes`);
  return { dtype: entry.dtype, count, low, high };
}

function checkLayout(entries, length) {
  let end = 0;
  for (const [name, { low, high }] of entries) {
    if (low !== end) throw new BundleError(`${name}: begins at byte ${low} of the data, expected ${end}`);
    end = high;
  }
  if (end !== length) throw new BundleError(`the header describes ${end} bytes of data, but ${length} follow`);
}

function digestOf(header, parts) {
  const { sha256: _, ...metadata } = header.__metadata__;
  const hasher = new Sha256();
  hasher.update(utf8(pythonJson({ ...header, __metadata__: metadata }, true)));
  for (const part of parts) hasher.update(part);
  return hex(hasher.digest());
}

function readMask(manifest, text, data = new Uint8Array()) {
  let said;
  try {
    said = JSON.parse(text);
  } catch {
    throw new BundleError("the mask's description is not JSON");
  }
  const named = isRecord(said) ? Object.keys(said).sort().join() : "";
  const empty = data.length === 0;
  try {
    if (said?.form === "bits" && named === "form") return neuronsFromBits(manifest, data);
    if (said?.form === "index" && named === "form") return fromIndex(manifest, data);
    if (said?.form === "full" && named === "form" && empty) return null;
    if (said?.form === "first" && named === "counts,form" && empty) return firstNeurons(manifest, said.counts);
    if (said?.form === "draw" && named === "form,key,ratio" && empty) return drawNeurons(manifest, said);
  } catch (error) {
    throw error instanceof ProtocolError ? new BundleError(error.message) : error;
  }
  throw new BundleError("the mask's form must be full, draw, bits, index or first");
}

function firstNeurons(manifest, counts) {
  const sizes = [...manifest.groups];
  const sound = Array.isArray(counts) && counts.length === sizes.length
    && counts.every((count, place) => Number.isInteger(count) && count >= 1 && count <= sizes[place][1]);
  if (!sound) throw new BundleError("the mask must have the number of first neurons of each group");
  return new Map(sizes.map(([group], place) => [group, Int32Array.from({ length: counts[place] }, (_, index) => index)]));
}

function fromIndex(manifest, data) {
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  const mask = new Map();
  let start = 0;
  for (const [group, size] of manifest.groups) {
    const width = size <= 2 ** 16 ? 2 : 4;
    const count = start + 4 <= data.length ? view.getUint32(start, true) : Infinity;
    const end = start + 4 + count * width;
    if (count > size || end > data.length) throw new BundleError(`${group}: the mask's index list does not fit`);
    const read = (place) => (width === 2 ? view.getUint16(place, true) : view.getUint32(place, true));
    const first = start + 4;
    mask.set(group, Int32Array.from({ length: count }, (_, index) => read(first + index * width)));
    start = end;
  }
  if (start !== data.length) throw new BundleError("the mask has bytes after its index lists");
  checkMask(manifest, mask);
  return mask;
}

/** Return the shorter of a mask's forms: its draw, or its bits. */
function writeMask(manifest, mask, draw) {
  if (mask === null) return { said: { form: "full" }, bytes: new Uint8Array() };
  const bits = neuronBits(manifest, mask);
  const drawn = draw && { form: "draw", ...draw };
  if (drawn && pythonJson(drawn, true).length < 60 + 15 + bits.length) return { said: drawn, bytes: new Uint8Array() };
  return { said: { form: "bits" }, bytes: bits };
}

function fromBytes(data, dtype) {
  const { buffer } = data.slice();
  if (dtype === "F32") return new Float32Array(buffer);
  const bits = new Uint16Array(buffer);
  if (dtype === "F16") return fromHalf(bits);
  return new Float32Array(Uint32Array.from(bits, (each) => each << 16).buffer);
}

/** Return little-endian bytes of float32 values in a precision of the wire. */
function toBytes(values, precision) {
  if (!values.every(Number.isFinite)) throw new TrainingDiverged("training diverged: a value is not finite", "training-diverged/values");
  if (precision === "fp32") return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  const short = Uint16Array.from(bits, precision === "fp16" ? toHalf : toBrain);
  const infinite = precision === "fp16" ? 0x7c00 : 0x7f80;
  if (short.some((each) => (each & infinite) === infinite)) {
    throw new TrainingDiverged(`a value does not fit ${precision}; ask the operator to choose precision=fp32`, "training-diverged/values");
  }
  return new Uint8Array(short.buffer);
}

/** Return bfloat16's bits of float32's, rounded to nearest, ties to even. */
const toBrain = (bits) => (bits + (((bits >>> 16) & 1) + 0x7fff)) >>> 16;

/** Return float16's bits of float32's, rounded to nearest, ties to even. */
function toHalf(bits) {
  const sign = (bits >>> 16) & 0x8000, exponent = ((bits >>> 23) & 255) - 112, fraction = bits & 0x7fffff;
  if (exponent >= 31) return sign | 0x7c00;
  if (exponent <= 0) {
    if (exponent < -10) return sign;
    const whole = fraction | 0x800000, shift = 14 - exponent;
    const half = 1 << (shift - 1), rest = whole & ((1 << shift) - 1), kept = whole >>> shift;
    return sign | (kept + (rest > half || (rest === half && kept & 1) ? 1 : 0));
  }
  const rest = fraction & 0x1fff, kept = (exponent << 10) | (fraction >>> 13);
  return sign | (kept + (rest > 0x1000 || (rest === 0x1000 && kept & 1) ? 1 : 0));
}
