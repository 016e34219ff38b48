/** Reads tables of samples: text with a row of names and then a row per sample (CSV, RFC 4180). */

import { DataError, asNumber } from "./samples.js";

/** What the column with the classes is called. */
const LABELS = ["label", "y", "target"];

/** What the column is called that says who made a sample, or on which device. */
const PEOPLE = ["person", "subject", "people", "device"];

/** How pandas and others write that a value is missing. */
const MISSING = new Set([
  ...["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"],
  ...["NULL", "NaN", "None", "n/a", "nan", "null"],
]);

const TRUTH = { true: 1, false: 0 };

/**
 * The samples of a table.
 *
 * One column is called label, y or target; one may say who made a sample (person, subject, people or device); all
 * others hold numbers. Cells are separated by commas or, where the first row has more of them, by semicolons; then a
 * decimal comma is taken too. Returns { columns: their names, inputs: Float32Array [rows * features], NaN where a value
 * is missing, features, labels: string[], people: string[] or null }. Throws DataError.
 */
export function readTable(text) {
  const plain = text.replace(/^\ufeff/, "");
  const separator = separatorOf(plain);
  const [names, ...rows] = cellsOf(plain, separator);
  if (!names) throw new DataError("the table is empty; give a row of names, and a row per sample");
  const columns = names.map((name) => name.trim());
  const label = LABELS.find((name) => columns.includes(name));
  if (label === undefined) {
    throw new DataError(
      `the table has the columns ${columns.slice(0, 4).join(", ")}${columns.length > 4 ? ", ..." : ""}, but none ` +
        `called ${LABELS.join(" or ")}; name the column with the classes so`,
    );
  }
  checkNames(columns, label);
  rows.forEach((row, i) => checkLength(row, i, columns));
  const person = PEOPLE.find((name) => columns.includes(name));
  const values = columns.flatMap((name, at) => (name === label || name === person ? [] : [at]));
  const inputs = new Float32Array(rows.length * values.length);
  values.forEach((from, to) => {
    rows.forEach((row, i) => {
      inputs[i * values.length + to] = valueOf(row[from], columns[from], separator);
    });
  });
  return {
    columns,
    inputs,
    features: values.length,
    labels: whole(rows, columns, label),
    people: person === undefined ? null : whole(rows, columns, person),
  };
}

function checkNames(columns, label) {
  const unnamed = columns.indexOf("");
  if (unnamed >= 0) {
    throw new DataError(
      `the table: its column ${unnamed + 1} has no name, as an index has none; write it with to_csv(index=False)`,
    );
  }
  const people = columns.filter((name) => PEOPLE.includes(name));
  if (people.length > 1) {
    throw new DataError(`the table: both ${people[0]} and ${people[1]} say who made a sample; keep one of them`);
  }
  if (columns.filter((name) => name === label).length > 1) {
    throw new DataError(`the table: two columns are called ${label}; keep one of them`);
  }
}

function checkLength(row, i, columns) {
  if (row.length === columns.length) return;
  throw new DataError(
    `the table: row ${i + 1} below the names has ${row.length} cells, there are ${columns.length} columns; ` +
      "give each row one cell per column",
  );
}

/** A cell's number, NaN where the value is missing. */
function valueOf(cell, column, separator) {
  const text = cell.trim();
  if (MISSING.has(text)) return NaN;
  const number = asNumber(separator === ";" ? text.replace(",", ".") : text);
  const value = Number.isNaN(number) ? TRUTH[text.toLowerCase()] : number;
  if (value !== undefined) return value;
  throw new DataError(
    `the table: the column ${column} holds no numbers (${text.slice(0, 20)}); replace its values by numbers, or ` +
      "remove it",
  );
}

/** The cells of a column in which none may be missing. */
function whole(rows, columns, name) {
  const at = columns.indexOf(name);
  const cells = rows.map((row) => row[at].trim());
  if (!cells.some((cell) => MISSING.has(cell))) return cells;
  throw new DataError(`the table: the column ${name} lacks a value; remove such rows`);
}

/** What separates cells: a comma, unless the first row has more semicolons. */
function separatorOf(text) {
  const first = /^(?:"(?:[^"]|"")*"|[^"\r\n])*/.exec(text)[0].replace(/"(?:[^"]|"")*"/g, "");
  const count = (separator) => first.split(separator).length;
  return count(";") > count(",") ? ";" : ",";
}

/** The rows of a table, each a list of its cells; empty lines are left out. */
function cellsOf(text, separator) {
  const rows = [];
  let row = [];
  let at = 0;
  while (at < text.length) {
    const { cell, end } = cellAt(text, at, separator);
    row.push(cell);
    if (text[end] === separator) {
      at = end + 1;
      if (at < text.length) continue;
      row.push(""); // the last cell of the last row, which is empty
    }
    if (row.length > 1 || row[0] !== "") rows.push(row);
    row = [];
    at = text[end] === "\r" && text[end + 1] === "\n" ? end + 2 : end + 1;
  }
  return rows;
}

/** The cell that begins at `at`, without its quotes, and where it ends: before a separator or line end. */
function cellAt(text, at, separator) {
  const isEnd = (character) => character === separator || character === "\n" || character === "\r";
  if (text[at] !== '"') {
    let end = at;
    while (end < text.length && !isEnd(text[end])) end++;
    return { cell: text.slice(at, end), end };
  }
  let end = at;
  do {
    end = text.indexOf('"', end + 1);
    if (end < 0) throw new DataError("the table: a quotation mark is opened and never closed; close it");
  } while (text[++end] === '"');
  if (end < text.length && !isEnd(text[end])) {
    throw new DataError('the table: text follows a closing quotation mark; write quotation marks inside twice, as ""');
  }
  return { cell: text.slice(at + 1, end - 1).replaceAll('""', '"'), end };
}
