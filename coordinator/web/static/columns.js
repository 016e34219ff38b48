/**
 * A table's cells to raw samples, a row each: `sparrow/reading/roles.py`, which says what each column is for, and
 * `tables.py`. A federation's columns are found by name; without such names all columns besides labels and people are
 * features, in their order.
 */
import { DataError } from "./errors.js";
import { product } from "./manifest.js";
import { isInteger, isMissing, number } from "./numbers.js";
import { explain } from "./table.js";
import { many, some } from "./words.js";

export const PEOPLE = ["person", "subject", "people", "device", "writer", "speaker", "role", "domain"];
const LABELS = ["label", "y", "target", "class"];
const RUN = "run";
const INDEXES = ["Unnamed: 0", "__index_level_0__"];
const LARGEST = 3.4028234663852886e38;
const UNKNOWN = -1;
const REMOVE = "leave such rows out of the file, or fill in the values";

/**
 * Return { inputs: Float32Array [rows * features], labels: texts [rows], at(row): a label's place in words, runs: integers
 * [rows] or null, people: how many made them, 0 if it is not said, columns: names, label: that of the column, said: remarks }
 * of a table as `readTable` returns it.
 *
 * source: the file's name. preparation, targets: the manifest's, or null. inputShape: of a sample without preparation.
 * Throws DataError.
 */
export function readRows(table, source, { preparation, targets, inputShape }) {
  const roles = assign(source, table.names, preparation?.columns ?? [], targets);
  const { said } = roles, column = (place) => table.rows.map(({ cells }) => cells[place].trim());
  const here = (row, place) => `${source}: line ${table.rows[row].line}, column ${table.names[place]}`;
  leaveOutIndex(source, table, roles, column);
  const runs = runsOf(table, roles, column);
  const declared = preparation?.columns.length ? preparation.columns : roles.features.map(() => ({ categories: [] }));
  if (!roles.features.length) {
    throw new DataError(`${source}: has no column besides labels and people; add columns of measurements`);
  }
  checkWidth(source, roles.features.length, preparation, inputShape);
  const width = roles.features.length, inputs = new Float32Array(table.rows.length * width);
  roles.features.forEach((from, to) => {
    const cells = column(from), { categories } = declared[to];
    const values = categories.length
      ? indicesOf(cells, categories, table.names[from], said)
      : numbersOf(cells, table.decimal, (row) => here(row, from));
    values.forEach((value, row) => (inputs[row * width + to] = value));
  });
  if (roles.person !== null) {
    const empty = column(roles.person).indexOf("");
    if (empty >= 0) {
      throw new DataError(`${here(empty, roles.person)}: the person is missing; add it, or remove the column`);
    }
  }
  return {
    inputs, runs, people: roles.person === null ? 0 : new Set(column(roles.person)).size,
    said: [...table.said, ...said], label: table.names[roles.label], at: (row) => here(row, roles.label),
    labels: table.rows.map(({ cells }) => cells[roles.label]),
    columns: roles.features.map((place, to) => declared[to].name ?? table.names[place]),
  };
}

// --- what each column is for ---------------------------------------------------------------------------------------

/** Return the places { features, label, person, run, index }, null for none, and remarks. Throws DataError. */
function assign(source, names, wanted, targets) {
  checkNames(source, names);
  const said = [], chosen = wanted.map(({ name }) => placeOf(source, name, names, said));
  const label = labelOf(source, names, chosen, targets);
  const free = [...names.keys()].filter((place) => place !== label && !chosen.includes(place));
  const person = personOf(source, names, free);
  const run = free.find((place) => names[place].toLowerCase() === RUN) ?? null;
  if (person !== null) said.push(`the column ${names[person]} identifies people and is not a feature`);
  if (wanted.length) {
    const others = free.filter((place) => place !== person && place !== run);
    const further = others.map((place) => names[place] || "(without a name)");
    if (further.length) {
      said.push(`the federation does not use ${many(further.length, "column")}, left out: ${some(further)}`);
    }
    return { features: chosen, label, person, run, index: null, said };
  }
  const others = free.filter((place) => place !== person);
  const index = others.find((place) => INDEXES.includes(names[place]) || (place === 0 && !names[0])) ?? null;
  const features = others.filter((place) => place !== index);
  const unnamed = features.find((place) => !names[place]);
  if (unnamed !== undefined) {
    throw new DataError(`${source}: column ${unnamed + 1} has no name; write one into the first line, or remove the column`);
  }
  return { features, label, person, run, index, said };
}

/** Return the place of `name`: as it is, or else trimmed and in any case if that is one column only; -1 without one. */
function find(name, names) {
  if (names.includes(name)) return names.indexOf(name);
  const alike = [...names.keys()].filter((place) => names[place].trim().toLowerCase() === name.trim().toLowerCase());
  return alike.length === 1 ? alike[0] : -1;
}

const columnsOf = (names) => `it has the columns ${some(names.map((name) => name || "(without a name)"), 12)}`;

function checkNames(source, names) {
  const twice = names.find((name, place) => name && names.indexOf(name) !== place);
  if (twice) throw new DataError(`${source}: two columns are called ${twice}; rename or remove one`);
}

function placeOf(source, name, names, said) {
  const place = find(name, names);
  if (place < 0) throw new DataError(`${source}: has no column ${name}, which the federation uses; ${columnsOf(names)}`);
  if (names[place] !== name) said.push(`the column '${names[place]}' was used as the federation's '${name}'`);
  return place;
}

function labelOf(source, names, chosen, targets) {
  const free = (place) => !chosen.includes(place);
  if (targets?.column) {
    const place = find(targets.column, names);
    if (place >= 0 && free(place)) return place;
    throw new DataError(
      `${source}: the federation's labels are called ${targets.column}, but ${columnsOf(names)}; name the column so`,
    );
  }
  const found = [...names.keys()].filter((place) => free(place) && LABELS.includes(names[place].toLowerCase()));
  if (found.length > 1) {
    const alike = found.map((place) => names[place]).join(" and ");
    throw new DataError(`${source}: ${alike} may each be the label; keep one of them`);
  }
  if (!found.length) {
    throw new DataError(
      `${source}: no column is called ${LABELS.join(" or ")}; ${columnsOf(names)}. Name the one with the labels so`,
    );
  }
  return found[0];
}

function personOf(source, names, free) {
  const found = free.filter((place) => PEOPLE.includes(names[place].replace(/\s+/g, "").toLowerCase()));
  if (found.length > 1) {
    const [one, two] = found.map((place) => names[place]);
    throw new DataError(`${source}: both ${one} and ${two} say who made a sample; remove one of them`);
  }
  return found[0] ?? null;
}

/** Refuse an unnamed first column unless it counts the rows, as pandas' index does. */
function leaveOutIndex(source, { names, decimal }, { index, said }, column) {
  if (index === null) return;
  const called = names[index] || `${index + 1}, which has no name,`;
  const values = column(index).map((cell) => number(cell, decimal));
  if (![0, 1].some((first) => values.every((value, row) => value === row + first))) {
    throw new DataError(
      `${source}: column ${called} does not count the rows, as pandas' index would; write the table with ` +
        "to_csv(index=False), or name the column",
    );
  }
  said.push(`column ${called} counts the rows and was left out`);
}

/** Return which recording each row is of; null without such a column, which is a feature if it holds no integers. */
function runsOf({ names }, roles, column) {
  if (roles.run === null) return null;
  const cells = column(roles.run), whole = cells.every(isInteger), name = names[roles.run];
  if (whole) {
    roles.features = roles.features.filter((place) => place !== roles.run);
    roles.said.push(`the column ${name} identifies recordings and is not a feature`);
    return cells.map(Number);
  }
  if (!roles.features.includes(roles.run)) roles.said.push(`the column ${name} was left out`);
  return null;
}

function checkWidth(source, width, preparation, inputShape) {
  if (!preparation) {
    if (width === product(inputShape)) return;
    throw new DataError(
      `${source}: samples have shape (${width},), but the federation's model takes ${inputShape.join(" x ")} numbers; give ` +
        "samples of that shape",
    );
  }
  const { columns, shape, dtype } = preparation;
  if (columns.length || (dtype === "float32" && shape.length === 1 && shape[0] === width)) return;
  throw new DataError(
    `${source}: has ${many(width, "column")} of numbers, the federation wants samples of ${shape.join(" x ")} as ` +
      `${dtype}; give the data that the model was published for`,
  );
}

// --- values --------------------------------------------------------------------------------------------------------

/** Return a column's numbers. here(row): the cell in words. Throws DataError for what is missing, or is no number. */
function numbersOf(cells, decimal, here) {
  const values = cells.map((cell) => number(cell, decimal));
  const first = (wrong) => values.findIndex(wrong);
  const text = first((value) => value === null);
  if (text >= 0) {
    const advice = explain(cells[text], decimal) || "the federation takes numbers here; correct it, or remove the row";
    throw new DataError(`${here(text)}: '${cells[text]}' is not a number; ${advice}`);
  }
  const beyond = first((value) => Math.abs(value) > LARGEST);
  if (beyond >= 0) {
    throw new DataError(`${here(beyond)}: '${cells[beyond]}' is infinite or beyond float32; correct it, or remove the row`);
  }
  const missing = first(Number.isNaN);
  if (missing < 0) return values;
  const lost = values.filter(Number.isNaN).length.toLocaleString("en");
  throw new DataError(`${here(missing)}: the value is missing ('${cells[missing]}'; ${lost} in this column); ${REMOVE}`);
}

/** Return the index of each cell among the `known` categories, -1 for others, which are said. */
function indicesOf(cells, known, name, said) {
  const places = new Map(known.map((each, index) => [each, index]));
  const truth = (cell) => (/^(true|false)$/i.test(cell) ? cell.toLowerCase() : cell);
  const indices = cells.map((cell) => places.get(cell) ?? places.get(truth(cell)) ?? UNKNOWN);
  const unknown = new Map();
  const lost = cells.filter((cell, row) => indices[row] === UNKNOWN && isMissing(cell)).length;
  if (lost) said.push(`column ${name}: no name in ${many(lost, "row")}, read as none of the categories`);
  cells.forEach((cell, row) => {
    if (indices[row] === UNKNOWN && !isMissing(cell)) unknown.set(cell, (unknown.get(cell) ?? 0) + 1);
  });
  if (unknown.size) {
    const counted = [...unknown].sort(([, one], [, other]) => other - one);
    const listed = counted.map(([cell, times]) => `${cell} (${times.toLocaleString("en")} times)`);
    said.push(`column ${name}: the federation does not know ${some(listed)}`);
  }
  return indices;
}
