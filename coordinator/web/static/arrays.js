/**
 * An npz file's arrays to samples and labels: `sparrow/reading/archives.py`. Samples are raw if the federation has a
 * preparation, else the model's inputs.
 */
import { PEOPLE } from "./columns.js";
import { DataError } from "./errors.js";
import { classesIn } from "./labels.js";
import { LIMITS, RAW } from "./raw.js";
import { some } from "./words.js";

/**
 * Return { uses: Map of "" or train, val and test -> { inputs, labels: names of classes [N], runs: integers [N] or null,
 * people: how many made them, 0 if it is not said }, each: a sample in words, said: remarks }. inputs: the raw array, or { values: Float32Array, bytes: whether stored as bytes }
 * without preparation. Throws DataError.
 */
export function readArrays(arrays, source, { preparation, targets, inputShape, outputs }) {
  const said = [], declared = declaredIn(arrays, source), uses = new Map();
  if (declared && !targets?.names.length && declared.length !== outputs) {
    throw new DataError(`${source}: classes: the file has ${declared.length}, the federation's model ${outputs}; correct it`);
  }
  for (const use of usesOf(arrays, source)) {
    const key = (name) => (use ? `${name}_${use}` : name), stored = arrays.get(key("x")), called = `${source}: ${key("x")}`;
    if (!stored.shape.length || stored.shape.includes(0)) {
      throw new DataError(`${called} has shape ${tuple(stored.shape)}; give at least one sample`);
    }
    const [count] = stored.shape;
    uses.set(use, {
      inputs: preparation ? rawOf(stored, called, preparation) : unprepared(stored, called, inputShape),
      labels: labelsIn(arrays, key("y"), source, count, { declared, targets, said }),
      runs: runsIn(arrays, key("run"), source, count),
      people: new Set(PEOPLE.flatMap((name) => Array.from(arrays.get(key(name))?.data ?? [], String))).size,
    });
  }
  const { shape, type } = arrays.get(uses.has("") ? "x" : "x_train");
  return { uses, each: `each ${preparation?.dtype ?? typeName(type)} ${shape.slice(1).join("x")}`, said };
}

/** The uses whose samples a file has, "" for all in one. */
function usesOf(arrays, source) {
  const uses = ["train", "val", "test"].filter((use) => arrays.has(`x_${use}`) || arrays.has(`y_${use}`));
  if (uses.length && uses[0] !== "train") uses.unshift("train");
  if (!uses.length) uses.push("");
  for (const use of uses) {
    for (const key of ["x", "y"].map((name) => (use ? `${name}_${use}` : name))) {
      if (arrays.has(key)) continue;
      const met = some([...arrays.keys()].sort()) || "nothing";
      const wanted = use ? `${key}; add it` : "x and y or x_train; name them so";
      throw new DataError(`${source}: holds ${met}, but no ${wanted}`);
    }
  }
  return uses;
}

/** An array of the federation's raw samples, in its type. */
function rawOf({ shape, type, data }, called, { dtype, shape: wanted, axes }) {
  if (!"fiub".includes(type[0])) throw wrongType(called, type);
  if (!same(shape.slice(1), wanted)) {
    const swap = shape.length > 2 && same([...shape.slice(1)].sort(), [...wanted].sort())
      ? "; its axes seem to be in another order: transpose it with numpy.transpose" : "";
    throw new DataError(
      `${called} has samples of shape ${tuple(shape.slice(1))}, the federation's have ${tuple(wanted)}` +
        `${axes ? ` with axes=N${axes}` : ""}${swap}`,
    );
  }
  if (type[0] === "f" && dtype !== "float32") {
    throw new DataError(
      `${called} is of ${typeName(type)}, the federation's samples are ${dtype}; give them as they were recorded, not scaled`,
    );
  }
  if (dtype === "float32") {
    const values = data instanceof Float32Array ? data : Float32Array.from(data);
    checkFinite(called, values, shape[0]);
    return values;
  }
  const [least, most] = LIMITS[dtype];
  const beyond = data.findIndex((value) => value < least || value > most);
  if (beyond >= 0) {
    throw new DataError(`${called}[${Math.floor((beyond * shape[0]) / data.length)}] holds ${data[beyond]}, beyond ${dtype}; ` +
      "correct it or leave out the sample");
  }
  return dtype === "int64" ? BigInt64Array.from(data, BigInt) : RAW[dtype].from(data);
}

/** An array of samples that a model takes without preparation: { values: float32, bytes: whether stored as bytes }. */
function unprepared({ shape, type, data }, called, inputShape) {
  if (!"fiub".includes(type[0])) throw wrongType(called, type);
  const stored = shape.slice(1), withChannel = stored.length === 2 ? [1, ...stored] : stored;
  if (!same(withChannel, inputShape) && !same(stored, inputShape)) {
    throw new DataError(
      `${called}: samples have shape ${tuple(stored)}, but the federation's model takes ${tuple(inputShape)}; give samples of ` +
        "that shape",
    );
  }
  const values = data instanceof Float32Array ? data : new Float32Array(data);
  checkFinite(called, values, shape[0]);
  return { values, bytes: type === "u1" };
}

/** The classes that a file declares, texts; null if it declares none. */
function declaredIn(arrays, source) {
  const entry = arrays.get("classes");
  if (!entry) return null;
  const { shape, type, data } = entry;
  if (!shape.length && "iu".includes(type[0])) {
    if (data[0] >= 2 && data[0] <= 10_000) return Array.from({ length: data[0] }, (_, number) => String(number));
    throw new DataError(`${source}: classes is ${data[0]}; give the number of classes, 2 to 10,000`);
  }
  if (shape.length !== 1 || !"iuUS".includes(type[0]) || shape[0] < 2) {
    throw new DataError(
      `${source}: classes has shape ${tuple(shape)} of ${typeName(type)}; give the number of classes, or a list of two or ` +
        "more names",
    );
  }
  const names = Array.from(data, (name) => String(name).trim());
  if (new Set(names).size === names.length && !names.includes("")) return names;
  throw new DataError(`${source}: classes repeats a name or has an empty one (${some(names)}); correct it`);
}

/** The labels of `count` samples as names of classes. */
function labelsIn(arrays, key, source, count, { declared, targets, said }) {
  let { shape, type, data } = arrays.get(key);
  const called = `${source}: ${key}`, at = (place) => `${called}[${place}]`;
  if (shape.length === 2 && shape[1] === 1) {
    said.push(`${key} of shape ${tuple(shape)} was read as ${tuple(shape.slice(0, 1))}`);
    shape = shape.slice(0, 1);
  }
  if (shape[0] !== count) {
    throw new DataError(`${called} has shape ${tuple(shape)} beside ${count} samples; give one label per sample`);
  }
  if (shape.length === 2) {
    said.push(`the one-hot rows of ${key} were read as classes 0 to ${shape[1] - 1}`);
    [data, type] = [fromOneHot(called, { shape, type, data }, declared), "i8"];
  } else if (shape.length !== 1) {
    throw new DataError(`${called} has shape ${tuple(shape)}; a file's labels are one per sample`);
  }
  if (!"iubfUS".includes(type[0])) throw new DataError(`${called} is of ${typeName(type)}; store integers or text`);
  if (declared && targets?.names.length && "iu".includes(type[0])) {
    const { shape: of, type: stored } = arrays.get("classes");
    data = named(called, data, declared, of.length === 1 && "iu".includes(stored[0]));
  }
  const known = [...(targets?.names ?? []), ...(targets?.names.length ? [] : declared ?? [])];
  const labels = classesIn(Array.from(data, textOf(type)), { known, at, floats: type[0] === "f", said });
  const other = declared && targets?.names.length ? labels.findIndex((label) => !declared.includes(label)) : -1;
  if (other < 0) return labels;
  throw new DataError(
    `${at(other)} is '${labels[other]}', which the entry classes does not name (${some(declared)}); correct the label, or ` +
      "add its class",
  );
}

function textOf(type) {
  if (type[0] === "b") return (value) => (value ? "True" : "False");
  if (type[0] !== "f") return String;
  return (value) => (Number.isNaN(value) ? "" : Number.isInteger(value) ? value.toFixed(1) : String(value));
}

/** The place of the 1 in each row. */
function fromOneHot(called, { shape: [rows, width], type, data }, declared) {
  const numeric = "iubf".includes(type[0]), row = (place) => data.subarray(place * width, (place + 1) * width);
  const places = numeric ? Array.from({ length: rows }, (_, place) => row(place).indexOf(1)) : [];
  const sound = numeric && places.every((place) => place >= 0)
    && data.every((value) => value === 0 || value === 1) && data.filter((value) => value === 1).length === rows;
  if (!sound) {
    throw new DataError(
      `${called} has shape ${tuple([rows, width])}, and its rows are not one-hot; give one label per sample`,
    );
  }
  if (declared && declared.length !== width) {
    throw new DataError(`${called} has rows of ${width}, but classes lists ${declared.length}; provide one name per column`);
  }
  return places;
}

/** The names of integer labels: positions in the declared classes, unless these are integers too. */
function named(called, labels, declared, integers) {
  if (integers && labels.every((label) => declared.includes(String(label)))) return labels;
  const place = labels.findIndex((label) => label < 0 || label >= declared.length);
  if (place < 0) return Array.from(labels, (label) => declared[label]);
  throw new DataError(
    `${called}[${place}] is ${labels[place]}, but classes declares ${declared.length}, 0 to ${declared.length - 1} ` +
      `(${some(declared)}); correct the label, or add its class to the entry classes`,
  );
}

function runsIn(arrays, key, source, count) {
  const entry = arrays.get(key);
  if (!entry) return null;
  if (same(entry.shape, [count]) && "iu".includes(entry.type[0])) return entry.data;
  throw new DataError(
    `${source}: ${key} has shape ${tuple(entry.shape)} of ${typeName(entry.type)}; give an integer for each of ${count} samples`,
  );
}

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

const wrongType = (called, type) =>
  new DataError(`${called} is of ${typeName(type)}; store numbers, such as float32, or uint8 for images`);

function checkFinite(called, values, count) {
  const wrong = values.findIndex((value) => !Number.isFinite(value));
  if (wrong < 0) return;
  const what = values.some((value) => Math.abs(value) === Infinity) ? "an infinite value" : "a missing value (NaN)";
  const sample = Math.floor((wrong * count) / values.length);
  throw new DataError(`${called} has ${what} in sample ${sample}; leave such samples out of the file`);
}
