/**
 * Labels to numbers of outputs: `sparrow/reading/labels.py` and `edge_sdk/tasks/own.py`. Labels are names, text and
 * integers by their digits; a federation without names of classes takes the numbers of its outputs.
 */
import { DataError } from "./errors.js";
import { isInteger, isMissing, number } from "./numbers.js";
import { hex, sha256, utf8 } from "./sha256.js";

const LONGEST = 200; // characters of a name
const NAMED = 12;

/**
 * Return labels as names of classes, texts; `1` for `1.0` where all are numbers and none is a name of its own.
 *
 * written: texts. at(place): where a label stands, for messages. decimal: the sign. floats: whether they were stored as
 * floats. said: remarks, to which changes are added. Throws DataError.
 */
export function classesIn(written, { known = [], at, decimal = ".", floats = false, said }) {
  const texts = written.map((text) => text.trim()), found = new Map();
  const blank = texts.findIndex((text, place) => text !== written[place]);
  if (blank >= 0) said.push(`blanks around labels were removed: '${written[blank]}' was read as '${texts[blank]}'`);
  texts.forEach((text, place) => found.has(text) || found.set(text, place));
  if (found.has("")) {
    const count = texts.filter((text) => !text).length.toLocaleString("en");
    throw new DataError(`${at(found.get(""))}: the label is missing (${count} in all); leave such samples out of the file`);
  }
  const values = new Map([...found.keys()].map((text) => [text, number(text, decimal)]));
  const numeric = [...values.values()].every((value) => value !== null);
  const isWritten = (text) => Number.isFinite(values.get(text)) && (text.includes(decimal) || /e/i.test(text));
  const decimals = numeric && (floats || [...found.keys()].some(isWritten));
  for (const [text, place] of found) {
    if (text.length > LONGEST || text.includes("\0")) {
      throw new DataError(
        `${at(place)}: the label '${text.slice(0, 40)}'... is not a class name: it has ${text.length} characters; ` +
          `use at most ${LONGEST}`,
      );
    }
    if (decimals) found.set(text, whole(text, values.get(text), known, () => at(place)));
  }
  if (!decimals) return texts;
  const changed = [...found].find(([text, name]) => text !== name);
  if (changed) said.push(`labels are classes: ${changed[0]} was read as ${changed[1]}`);
  return texts.map((text) => found.get(text));
}

function whole(text, value, known, here) {
  if (known.includes(text) || isMissing(text) || isInteger(text)) return text;
  if (Number.isInteger(value)) return String(BigInt(value));
  throw new DataError(`${here()}: the label ${text} is a fraction, not a class; the federation's labels are classes`);
}

/**
 * Return { numbers: Int32Array, one for each of `labels`, names: of all outputs on this device, "" for an unused spare
 * one; null if the federation names none }.
 *
 * targets: the manifest's, or null. outputs: how many there are. Throws DataError, naming the first label without one.
 */
export function outputsOf(labels, { source, targets, outputs }) {
  const found = classOrder(labels);
  const [names, places] = targets?.names.length ? namesOf(found, source, targets) : [null, positions(found, source, outputs)];
  return { names, numbers: Int32Array.from(labels, (label) => places.get(label)) };
}

function namesOf(found, source, targets) {
  const count = targets.names.length + targets.spare;
  if (targets.numbered && found.every((name) => !targets.names.includes(name)) && arePositions(found, targets, count)) {
    const names = [...targets.names, ...Array(targets.spare).fill("")];
    return [names, new Map(found.map((name) => [name, Number(name)]))];
  }
  const names = withOwn(targets, found, (unknown) => new DataError(
    `${source}: has the class '${unknown}'; the federation's are ${listed(targets.names)}: correct the label, or ask the ` +
      "federation's operator to publish with it in --classes, or with --spare-classes",
  ));
  return [names, new Map(names.map((name, place) => [name, place]))];
}

/**
 * Return the names of all outputs on a device that has the classes `found` (`Targets.with_own`): an unknown name takes the
 * spare output that its SHA-256 decides, or the next free one. Throws `refused` of the first if these do not suffice.
 */
export function withOwn({ names, spare }, found, refused) {
  const unknown = [...new Set(found)].filter((name) => !names.includes(name)).sort(byCodePoints);
  if (unknown.length > spare) throw refused(unknown[0]);
  const own = Array(spare).fill("");
  for (const name of unknown) {
    let place = Number(BigInt(`0x${hex(sha256(utf8(name)).subarray(0, 8))}`) % BigInt(spare));
    while (own[place]) place = (place + 1) % spare;
    own[place] = name;
  }
  return [...names, ...own];
}

const isDigits = (name) => /^\d+$/.test(name);

/** Return whether labels can be numbers of named classes, whose names are no numbers. */
const arePositions = (found, { names }, count) =>
  !names.some(isDigits) && found.every((name) => isDigits(name) && Number(name) < count);

function positions(found, source, outputs) {
  const wrong = found.find((name) => !isDigits(name) || Number(name) >= outputs);
  if (wrong !== undefined) {
    throw new DataError(
      `${source}: has the class '${wrong}'; the federation names no classes, its labels are the numbers 0 to ${outputs - 1}`,
    );
  }
  return new Map(found.map((name) => [name, Number(name)]));
}

/** Return each name once: in numerical order if all are integers, otherwise in alphabetical order. */
export function classOrder(names) {
  const found = [...new Set(names)];
  if (!found.every(isInteger)) return found.sort(byCodePoints);
  const size = (name) => BigInt(name.replace("+", ""));
  return found.sort((one, other) => (size(one) < size(other) ? -1 : size(one) > size(other) ? 1 : byCodePoints(one, other)));
}

/** Return names for a line: of many the first, and how many there are. */
export const listed = (names) =>
  names.slice(0, NAMED).join(", ") + (names.length > NAMED ? `, ... (${names.length} in all)` : "");

/** Python's order of texts. JavaScript's own is that of 16-bit units, which differs for rare characters. */
export function byCodePoints(one, other) {
  const [a, b] = [[...one], [...other]];
  const at = a.findIndex((character, i) => character !== b[i]);
  if (at < 0) return a.length - b.length;
  return at < b.length ? a[at].codePointAt(0) - b[at].codePointAt(0) : 1;
}
