/** Reads numpy's npz files, as numpy.load(file, allow_pickle=False) does: a zip file with an npy file of each array. */

import { DataError } from "./errors.js";

const MOST_BYTES = 2 ** 30; // of all arrays of a file
const MOST_HEADER = 10_000; // characters, numpy's own limit
const MOST_TEXTS = 100_000; // in an array
const MOST_SQUEEZED = 1032; // bytes that deflate can make of one

const END = 0x06054b50;
const CENTRAL = 0x02014b50;
const LOCAL = 0x04034b50;
const END_SIZE = 22;
const CENTRAL_SIZE = 46;
const LOCAL_SIZE = 30;
const LONGEST_COMMENT = 65535;
const STORED = 0;
const DEFLATED = 8;

/**
 * The arrays of an npz file, a Blob or Uint8Array: Map of name -> { shape, type, data }.
 *
 * type: numpy's letter and bytes per value, as "f4", "i8", "u1", "b1" (true and false) "U7" or "S7" (texts). data: the
 * values in C order: the typed array of that type, Float64Array for i8 and u8, Float32Array for f2, string[] for texts;
 * null for types that are neither numbers nor texts. Throws DataError.
 */
export async function readArchive(file) {
  const blob = file instanceof Blob ? file : new Blob([file]);
  const called = blob.name ?? "the file";
  try {
    const found = new Map();
    for (const entry of await readDirectory(blob)) {
      if (!entry.name.endsWith(".npy")) continue;
      const name = entry.name.slice(0, -4);
      found.set(name, parseArray(name, await readEntry(blob, entry)));
    }
    return found;
  } catch (error) {
    if (error instanceof Refused) throw new DataError(`${called}: ${error.message}`);
    if (error instanceof DOMException) {
      throw new DataError(`${called}: cannot be read (${error.message}); choose the file again`);
    }
    if (error instanceof RangeError) {
      throw new DataError(`${called}: is too large for this browser (${error.message}); give fewer samples`);
    }
    throw error;
  }
}

class Refused extends Error {}

/** A file that numpy would not read either, or only by chance. */
const damaged = (what) => new Refused(`cannot be read as an npz file (${what}); write it with numpy.savez`);

// --- zip ---------------------------------------------------------------------------------------------------------

async function readView(blob, start, end) {
  return new DataView(await blob.slice(start, end).arrayBuffer());
}

/** Check the zip file's directory; return its entries { name, method, crc, packed, size, offset }. */
async function readDirectory(blob) {
  const first = await readView(blob, 0, 8);
  if (blob.size >= 6 && first.getUint8(0) === 0x93 && first.getUint32(1) === 0x4e554d50) {
    throw new Refused("holds one array; name several in one file with numpy.savez(path, x_train=x, y_train=y)");
  }
  if (blob.size < 4 || first.getUint16(0) !== 0x504b) {
    throw new Refused("holds pickled objects or is not an npz file; write plain arrays of numbers with numpy.savez");
  }
  const { count, size, offset } = await findEnd(blob);
  const view = await readView(blob, offset, offset + size);
  const entries = new Map();
  let at = 0;
  let total = 0;
  for (let i = 0; i < count; i++) {
    const entry = readCentral(view, at);
    at += entry.length;
    total += entry.size;
    if (entries.has(entry.name)) throw damaged(`it has two entries ${entry.name}`);
    if (total > MOST_BYTES) {
      throw new Refused("its arrays have more than 1 GiB, and a page takes no more; give fewer samples");
    }
    if (entry.offset + LOCAL_SIZE + entry.packed > offset) throw damaged(`${entry.name} lies outside the file`);
    entries.set(entry.name, entry);
  }
  if (at !== size) throw damaged("its directory has another length than it says");
  return entries.values();
}

/** The record at a zip file's end: how many entries there are, and where their directory lies. */
async function findEnd(blob) {
  const start = Math.max(0, blob.size - END_SIZE - LONGEST_COMMENT);
  const view = await readView(blob, start, blob.size);
  for (let at = view.byteLength - END_SIZE; at >= 0; at--) {
    if (view.getUint32(at, true) !== END || at + END_SIZE + view.getUint16(at + 20, true) !== view.byteLength) continue;
    const [count, size] = [view.getUint16(at + 10, true), view.getUint32(at + 12, true)];
    const offset = view.getUint32(at + 16, true);
    if (offset + size !== start + at) throw damaged("its directory is not where it says");
    return { count, size, offset };
  }
  throw damaged("it ends too early, or is not a zip file");
}

/** One entry of the directory, which has `length` bytes there. */
function readCentral(view, at) {
  if (at + CENTRAL_SIZE > view.byteLength || view.getUint32(at, true) !== CENTRAL) {
    throw damaged("its directory lacks entries");
  }
  const short = (offset) => view.getUint16(at + offset, true);
  const long = (offset) => view.getUint32(at + offset, true);
  const length = CENTRAL_SIZE + short(28) + short(30) + short(32);
  if (at + length > view.byteLength) throw damaged("its directory ends too early");
  const name = new TextDecoder().decode(new Uint8Array(view.buffer, at + CENTRAL_SIZE, short(28)));
  const entry = { name, length, method: short(10), crc: long(16), packed: long(20), size: long(24), offset: long(42) };
  if (short(8) & 1) throw new Refused(`${name} is encrypted; write the file with numpy.savez`);
  if (![STORED, DEFLATED].includes(entry.method)) {
    throw new Refused(`${name} is compressed by method ${entry.method}; write the file with numpy.savez_compressed`);
  }
  const most = entry.method === STORED ? entry.packed : MOST_SQUEEZED * (entry.packed + 1);
  if (entry.size > most || (entry.method === STORED && entry.size < most)) {
    throw damaged(`${name} announces ${entry.size} bytes, and holds ${entry.packed}`);
  }
  return entry;
}

/** An entry's bytes, inflated and checked. */
async function readEntry(blob, { name, method, crc, packed, size, offset }) {
  const local = await readView(blob, offset, offset + LOCAL_SIZE);
  if (local.getUint32(0, true) !== LOCAL) throw damaged(`${name} is not where the directory says`);
  const start = offset + LOCAL_SIZE + local.getUint16(26, true) + local.getUint16(28, true);
  const part = blob.slice(start, start + packed);
  if (part.size !== packed) throw damaged(`${name} ends too early`);
  const bytes = method === STORED ? new Uint8Array(await part.arrayBuffer()) : await inflate(part, name, size);
  if (crc32(bytes) !== crc) throw damaged(`${name} was changed, its check sum is wrong`);
  return bytes;
}

/** `part` inflated to `size` bytes, and to none more. */
async function inflate(part, name, size) {
  const bytes = new Uint8Array(size);
  const reader = part.stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  let at = 0;
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error instanceof DOMException ? error : damaged(`${name} is not deflated data`);
    });
    if (done) break;
    if (at + value.length > size) {
      await reader.cancel().catch(() => {});
      throw damaged(`${name} has more than the ${size} bytes that it announces`);
    }
    bytes.set(value, at);
    at += value.length;
  }
  if (at < size) throw damaged(`${name} has ${at} bytes, and announces ${size}`);
  return bytes;
}

const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let value = -1;
  for (let i = 0; i < bytes.length; i++) value = (value >>> 8) ^ CRC[(value ^ bytes[i]) & 0xff];
  return ~value >>> 0;
}

// --- npy ---------------------------------------------------------------------------------------------------------

const NUMBERS = {
  b1: [Uint8Array],
  u1: [Uint8Array],
  i1: [Int8Array],
  u2: [Uint16Array],
  i2: [Int16Array],
  u4: [Uint32Array],
  i4: [Int32Array],
  u8: [BigUint64Array, whole],
  i8: [BigInt64Array, whole],
  f2: [Uint16Array, halves],
  f4: [Float32Array],
  f8: [Float64Array],
};

/** The array of an npy file's bytes: { shape, type, data }. */
function parseArray(name, bytes) {
  const { header, start } = readHeader(name, bytes);
  const { descr, order, shape } = parseHeader(name, header);
  const known = /^([<>|=]?)([a-zA-Z])(\d+)(\[\w+\])?$/.exec(descr);
  if (descr === "|O" || descr === "O") {
    throw new Refused(`${name} holds pickled objects; write plain arrays of numbers with numpy.savez`);
  }
  const type = known ? known[2] + known[3] : "V0";
  const text = type[0] === "U" || type[0] === "S";
  if (!text && !(type in NUMBERS)) return { shape, type, data: null };
  const count = shape.reduce((product, length) => product * length, 1);
  if (text && count > MOST_TEXTS) throw new Refused(`${name} has ${count} texts; number the classes from 0`);
  const each = Number(known[3]) * (type[0] === "U" ? 4 : 1);
  if (bytes.length - start !== count * each) {
    throw damaged(`${name} has ${bytes.length - start} bytes of values, and announces ${count} of ${each}`);
  }
  const unit = type[0] === "U" ? 4 : type[0] === "S" ? 1 : each;
  const little = known[1] === ">" ? swapped(bytes.slice(start), unit) : aligned(bytes, start, unit);
  const values = !text ? numbersOf(name, little, NUMBERS[type])
    : type[0] === "U" ? texts(little, count, each / 4) : bytesAsTexts(name, little, count, each);
  return { shape, type, data: order === "True" ? fromFortran(values, shape) : values };
}

/** The text that describes an array, and where its values start. */
function readHeader(name, bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  if (bytes.length < 10 || view.getUint32(0) !== 0x934e554d || view.getUint16(4) !== 0x5059) {
    throw damaged(`${name} is not an array`);
  }
  const version = bytes[6];
  if (![1, 2, 3].includes(version) || bytes[7] !== 0) {
    throw damaged(`${name} has version ${version}.${bytes[7]} of numpy's format, known are 1.0 to 3.0`);
  }
  const from = version === 1 ? 10 : 12;
  if (bytes.length < from) throw damaged(`${name} ends within its header`);
  const length = version === 1 ? view.getUint16(8, true) : view.getUint32(8, true);
  if (from + length > bytes.length) throw damaged(`${name} ends within its header`);
  if (length > MOST_HEADER) throw damaged(`${name} has a header of ${length} characters`);
  const header = new TextDecoder(version === 3 ? "utf-8" : "latin1").decode(bytes.subarray(from, from + length));
  return { header, start: from + length };
}

/** descr, order (True where it is Fortran's) and shape of a header, a dictionary of Python. */
function parseHeader(name, header) {
  const descr = /'descr':\s*('[^']*'|[[(])/.exec(header);
  const order = /'fortran_order':\s*(True|False)\b/.exec(header);
  const shape = /'shape':\s*\(([\d,\s]*)\)/.exec(header);
  if (!/^\{.*\}\s*$/s.test(header) || !descr || !order || !shape) throw damaged(`${name} has a header of another kind`);
  const lengths = shape[1].split(",").filter((text) => text.trim() !== "");
  const found = lengths.map(Number);
  if (found.length > 32 || !found.every(Number.isSafeInteger)) throw damaged(`${name} has the shape (${shape[1]})`);
  return { descr: descr[1].replaceAll("'", ""), order: order[1], shape: found };
}

/** `bytes` from `start` on, where values of `unit` bytes can be read in place; a copy where they cannot. */
function aligned(bytes, start, unit) {
  const values = bytes.subarray(start);
  return values.byteOffset % unit === 0 ? values : values.slice();
}

/** `bytes` with those of each value of `unit` bytes in the opposite order, in place. */
function swapped(bytes, unit) {
  for (let at = 0; at < bytes.length; at += unit) bytes.subarray(at, at + unit).reverse();
  return bytes;
}

function numbersOf(name, bytes, [Type, convert]) {
  const values = new Type(bytes.buffer, bytes.byteOffset, bytes.length / Type.BYTES_PER_ELEMENT);
  return convert ? convert(values, name) : values;
}

/** 64-bit whole numbers in double precision. */
function whole(values, name) {
  return Float64Array.from(values, (value) => {
    const number = Number(value);
    if (Number.isSafeInteger(number)) return number;
    throw new Refused(`${name} holds ${value}, which is beyond 2^53; store smaller numbers, or float32`);
  });
}

/** Half precision: a sign, five bits of exponent, ten of fraction. */
function halves(values) {
  return Float32Array.from(values, (bits) => {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 0x1f;
    const fraction = (bits & 0x3ff) / 1024;
    if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
  });
}

/** Texts of `length` characters of four bytes each, filled up with zeros. */
function texts(bytes, count, length) {
  const characters = new Uint32Array(bytes.buffer, bytes.byteOffset, count * length);
  return Array.from({ length: count }, (_, i) => {
    const own = characters.subarray(i * length, (i + 1) * length);
    if (own.some((code) => code > 0x10ffff)) throw damaged("a text has an invalid character");
    return String.fromCodePoint(...own).replace(/\0+$/, "");
  });
}

/** Texts of `length` bytes each in UTF-8, filled up with zeros. */
function bytesAsTexts(name, bytes, count, length) {
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  try {
    return Array.from({ length: count }, (_, i) => {
      return decoder.decode(bytes.subarray(i * length, (i + 1) * length)).replace(/\0+$/, "");
    });
  } catch {
    throw new Refused(`${name} holds bytes that are not UTF-8; store text`);
  }
}

/** Values in C order, of those in Fortran's, whose first index runs fastest. */
function fromFortran(values, shape) {
  const found = values.slice();
  const steps = shape.map((_, axis) => shape.slice(0, axis).reduce((product, length) => product * length, 1));
  const index = shape.map(() => 0);
  let from = 0;
  for (let to = 0; to < found.length; to++) {
    found[to] = values[from];
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      from += steps[axis];
      if (++index[axis] < shape[axis]) break;
      from -= steps[axis] * shape[axis];
      index[axis] = 0;
    }
  }
  return found;
}
