/**
 * Folders of pictures or sounds to labelled samples: `sparrow/reading/folders.py` and `media.py`.
 *
 *     ROOT/CLASS/FILE          a folder for each class
 *     ROOT/train/CLASS/FILE    the same with parts; val and test beside train
 *
 * A picture is kept as its file, which has fewer bytes than its pixels, a sound as its samples.
 */
import { DataError } from "./errors.js";
import { byCodePoints } from "./labels.js";
import { readPixels } from "./pixels.js";
import { mediumOf } from "./raw.js";
import { readSound } from "./sounds.js";
import { many, some } from "./words.js";

const USES = ["train", "val", "test"];
const JUNK = new Set(["thumbs.db", "desktop.ini", "__macosx", "__pycache__"]);
const SUFFIXES = {
  picture: [".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"],
  sound: [".wav", ".wave", ".flac", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".aifc", ".mp3"],
};
const LONGEST_CLASS = 200; // characters

/**
 * Read a folder of the federation's pictures or sounds.
 *
 * files: [path, File] of each, the path beginning with the folder's name. raw: the description. progress(done, total) is
 * called before each. Returns { source, uses: Map of "" or train, val and test -> { inputs: samples as `readMedium` gives
 * them, labels: names of classes }, each: a sample in words, said: remarks }. Throws DataError, naming the first file that
 * cannot be read.
 */
export async function readFolder(files, raw, progress = () => {}) {
  const { source, found, said } = listed(files, mediumOf(raw));
  const uses = new Map(), looked = [];
  for (const [index, { use, label, path, file }] of found.entries()) {
    progress(index, found.length);
    const sample = await readMedium(new File([file], path, { type: file.type }), raw);
    looked.push(sample);
    if (!uses.has(use)) uses.set(use, { inputs: [], labels: [] });
    uses.get(use).inputs.push(sample.kept);
    uses.get(use).labels.push(label);
  }
  const lengths = raw.shape.map((_, axis) => looked.map(({ shape }) => shape[axis]));
  const largest = lengths.map((all) => all.reduce((one, other) => Math.max(one, other)));
  const alike = lengths.every((all) => all.every((length) => length === all[0]));
  const each = `${alike ? "each" : "up to"} ${raw.dtype} ${largest.join("x")}`;
  return { source, uses, each, said: [...said, ...remarks(looked, raw)] };
}

/**
 * Return a picture or sound as the federation's raw samples are: { kept: the picture's File, held in this browser, or the
 * sound's Float32Array; shape; and what `readPixels` or `readSound` says of it }. Throws DataError, naming the file.
 */
export async function readMedium(file, raw) {
  if (mediumOf(raw) === "sound") {
    const { values, ...sound } = await readSound(file, raw);
    return { kept: values, shape: [values.length], ...sound };
  }
  const { shape, clear } = await readPixels(file, raw);
  // The file on the disk may be changed or removed, or be on a card that is taken out.
  return { kept: new File([await file.arrayBuffer()], file.name, { type: file.type }), shape, clear };
}

function remarks(looked, { rate }) {
  const said = [], number = (wanted) => looked.filter(wanted).length;
  const others = looked.map((each) => each.rate).filter((own) => own && own !== rate);
  if (others.length) {
    const rates = some([...new Set(others)].sort((one, other) => one - other).map((own) => own.toLocaleString("en")));
    const were = others.length === 1 ? "was" : "were";
    said.push(`${many(others.length, "sound")} of ${rates} Hz ${were} resampled to ${rate.toLocaleString("en")} Hz`);
  }
  const several = number(({ channels }) => channels > 1), silent = number((each) => each.silent);
  const clear = number((each) => each.clear);
  if (several) said.push(`the channels of ${many(several, "sound")} were averaged`);
  if (silent) said.push(`${many(silent, "sound")} ${silent === 1 ? "is" : "are"} silent`);
  if (clear) said.push(`transparency is left out (${many(clear, "picture")})`);
  return said;
}

// --- which files there are -----------------------------------------------------------------------------------------

/** Return { source, found: { use, label, path, file } in the SDK's order, said }. Throws DataError. */
function listed(files, wanted) {
  const all = files.map(([path, file]) => ({ path, file, names: path.split("/").slice(1) }));
  all.sort((one, other) => inOrder(one.names, other.names));
  const source = files[0]?.[0].split("/")[0] ?? "the folder", said = [];
  const shown = all.filter(({ names }) => !names.some((name) => name.startsWith(".") || JUNK.has(name.toLowerCase())));
  const parts = partsOf(source, shown), above = parts.length ? 1 : 0;
  const beside = shown.filter(({ names }) => names.length <= above + 1);
  const nested = shown.filter(({ names }) => names.length > above + 2);
  const within = shown.filter(({ names }) => names.length === above + 2);
  const ignored = within.filter(({ path }) => !mediumNamed(path));
  const found = within.filter((each) => !ignored.includes(each)).map(({ path, file, names }) => (
    { path, file, use: above ? names[0].toLowerCase() : "", label: names[above], medium: mediumNamed(path) }));
  if (!found.length) throw new DataError(nothingIn(source, shown));
  checkMedium(source, found, wanted);
  checkClasses(source, found);
  const folder = ({ names }, depth) => [source, ...names.slice(0, depth)].join("/");
  const empty = new Set([...ignored, ...nested].map((each) => folder(each, above + 1)));
  for (const { path } of found) empty.delete(path.slice(0, path.lastIndexOf("/")));
  const were = ({ length }) => (length === 1 ? "was" : "were");
  if (beside.length) {
    const files = many(beside.length, "file");
    said.push(`${files} beside the folders of classes ${were(beside)} left out: ${counted(beside)}`);
  }
  if (ignored.length) {
    const are = ignored.length === 1 ? "is not a picture or sound and was" : "are not pictures or sounds and were";
    said.push(`${many(ignored.length, "file")} ${are} left out: ${counted(ignored)}`);
  }
  const inner = [...new Set(nested.map((each) => folder(each, above + 2)))];
  if (inner.length) said.push(`${many(inner.length, "folder")} within folders of classes left out: ${some(inner, 3)}`);
  const without = [...empty].map((path) => path.slice(source.length + 1));
  if (without.length) said.push(`folders without readable files, not used as classes: ${some(without)}`);
  const hidden = all.filter((each) => !shown.includes(each));
  if (hidden.length) said.push(`${many(hidden.length, "hidden file")} ${were(hidden)} left out`);
  found.sort((one, other) => USES.indexOf(one.use) - USES.indexOf(other.use));
  return { source, found, said };
}

function inOrder(names, others) {
  const at = names.findIndex((name, index) => name !== others[index]);
  return at < 0 || others[at] === undefined ? names.length - others.length : byCodePoints(names[at], others[at]);
}

/** Return the folders above those of classes, none where there are no parts. Throws DataError. */
function partsOf(source, shown) {
  const isPart = (name) => USES.includes(name.toLowerCase());
  const tops = [...new Set(shown.filter(({ names }) => names.length > 1).map(({ names: [top] }) => top))];
  const parts = tops.filter((top) => isPart(top) && shown.some(({ names }) => names[0] === top && names.length > 2));
  if (!parts.length) return parts;
  const others = tops.filter((top) => !parts.includes(top));
  if (others.length) {
    throw new DataError(
      `${source}: ${some(parts)} holds folders of classes, but ${some(others)} is beside it; name parts train, ` +
        "val and test: rename or remove it",
    );
  }
  if (parts.some((part) => part.toLowerCase() === "train")) return parts;
  throw new DataError(`${source}: has ${some(parts)}, but no train; add it, or rename one of them`);
}

const wantedIn = (source) =>
  `give a folder for each class, as in ${source}/CLASS/FILE, or ${source}/train/CLASS/FILE with val and test beside train`;

function nothingIn(source, shown) {
  const flat = shown.filter(({ path, names }) => names.length === 1 && mediumNamed(path)).length;
  if (flat) {
    return `${source}: holds ${many(flat, "file")} and no folders; ${wantedIn(source)}; or choose the files under their class`;
  }
  const held = shown.length ? counted(shown) : "it is empty";
  return `${source}: holds no picture and no sound in folders of classes (${held}); ${wantedIn(source)}`;
}

function checkMedium(source, found, wanted) {
  const of = (medium) => found.filter((each) => each.medium === medium);
  const kinds = [of("picture"), of("sound")].filter(({ length }) => length);
  if (kinds.length > 1) {
    const inside = (path) => path.slice(source.length + 1);
    const examples = kinds.map((each) => `${many(each.length, each[0].medium)}, such as ${inside(each[0].path)}`);
    throw new DataError(`${source}: holds ${examples.join(" and ")}; put them into separate folders`);
  }
  const [{ medium }] = found;
  if (medium === wanted) return;
  throw new DataError(
    `${source}: holds ${medium}s, the federation's samples are ${wanted}s; give a folder with a folder of ${wanted}s for ` +
      "each class",
  );
}

function checkClasses(source, found) {
  const long = found.map(({ label }) => label).find((label) => [...label].length > LONGEST_CLASS);
  if (long === undefined) return;
  const start = [...long].slice(0, 40).join("");
  throw new DataError(`${source}: the folder ${start}... has ${[...long].length} characters; use at most ${LONGEST_CLASS}`);
}

const suffixOf = (path) => /[^/](\.[^./]+)$/.exec(path)?.[1].toLowerCase() ?? "";
const mediumNamed = (path) => Object.keys(SUFFIXES).find((medium) => SUFFIXES[medium].includes(suffixOf(path))) ?? null;

/** Files by suffix, as in "2 .txt, 1 without suffix". */
function counted(files) {
  const counts = new Map();
  for (const { path } of files) {
    const suffix = suffixOf(path) || "without suffix";
    counts.set(suffix, (counts.get(suffix) ?? 0) + 1);
  }
  return [...counts].sort().map(([suffix, count]) => `${count.toLocaleString("en")} ${suffix}`).join(", ");
}
