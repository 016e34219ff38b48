/**
 * Text of a table, with a row of names and then a row per sample, to its cells: `sparrow/reading/dialect.py`. Encoding,
 * delimiter and decimal sign are found in the text.
 */
import { DataError } from "./errors.js";
import { isDecimal, isGrouped, number } from "./numbers.js";

const SAMPLE = 1000; // lines by which delimiter and decimal sign are found
const DELIMITERS = { ",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe" };
const BINARY = [
  ["PK\x03\x04", "a zip archive or spreadsheet (.xlsx, .ods); save the sheet as CSV, or unpack it"],
  ["\xd0\xcf\x11\xe0", "an old Excel file (.xls); save the sheet as CSV"],
  ["PAR1", "a parquet file; save the table as CSV"],
  ["\x1f\x8b", "compressed; unpack it"],
];
const NO_TABLE = "is binary, not a text; give a table as CSV, in UTF-8";

/**
 * Return a table's cells: { names, rows: [{ line, cells }], decimal, delimiter, said }. line: where a row begins in the
 * file, from 1. said: the dialect, if it is not a comma, a point and UTF-8. Throws DataError.
 *
 * source: the file's name, for messages.
 */
export function readTable(bytes, source) {
  const { text, said } = decoded(bytes, source);
  const head = firstLines(text, SAMPLE);
  const empty = () => new DataError(`${source}: the file is empty; give a table with a header and a row for each sample`);
  if (!head.trim()) throw empty();
  const declared = /^sep=([,;|]?)[ \t]*(?:\r\n|\r|\n|$)/i.exec(text);
  const delimiter = declared?.[1] || delimiterOf(declared ? head.slice(declared[0].length) : head);
  if (delimiter !== ",") said.push(`cells are separated by ${DELIMITERS[delimiter]}s`);
  const records = [...recordsOf(text, delimiter, source)].slice(declared ? 1 : 0);
  if (!records.length) throw empty();
  const [{ cells }, ...rows] = records;
  const names = cells.map((cell) => cell.split(/\s+/).filter(Boolean).join(" "));
  checkHeader(source, names, rows);
  const decimal = decimalOf(source, names, rows.slice(0, SAMPLE), delimiter);
  if (decimal === ",") said.push("numbers are written with a decimal comma");
  const odd = rows.find((row) => row.cells.length !== names.length);
  if (odd) {
    throw new DataError(
      `${source}: line ${odd.line} has ${odd.cells.length} cells, the header has ${names.length}; correct the line, or ` +
        `quote a cell that holds a ${DELIMITERS[delimiter]}`,
    );
  }
  return { names, rows, decimal, delimiter, said };
}

/** Return what to do about a cell that is not a number but looks like one; nothing if it does not. */
export function explain(text, decimal) {
  if (decimal === "." && isDecimal(text, ",") && !isGrouped(text)) {
    return "it has a decimal comma; write a point, or separate cells by semicolons";
  }
  if (isGrouped(text)) return "it has a thousands separator; write the number without it";
  if (decimal === "," && isDecimal(text, ".")) return "it has a decimal point; write a comma, as in other cells";
  return "";
}

function decoded(bytes, source) {
  const start = String.fromCharCode(...bytes.subarray(0, 8));
  const [, what] = BINARY.find(([magic]) => start.startsWith(magic)) ?? [];
  if (what) throw new DataError(`${source}: is ${what}`);
  const wide = { "\xff\xfe": "utf-16le", "\xfe\xff": "utf-16be" }[start.slice(0, 2)];
  const encoding = wide ?? "utf-8", said = [];
  let text;
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(bytes); // without its byte order mark
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // too long for this browser
    if (wide) throw new DataError(`${source}: is not written in UTF-16, as its first bytes say; save it as UTF-8`);
    text = new TextDecoder("windows-1252").decode(bytes);
    said.push("read as cp1252, since it is not UTF-8; save the file as UTF-8 if its letters are others");
  }
  if (firstLines(text, SAMPLE).includes("\0")) throw new DataError(`${source}: ${NO_TABLE}`);
  return { text, said };
}

function firstLines(text, count) {
  const ends = /\r\n|\r|\n/g;
  for (let i = 0; i < count; i++) if (!ends.exec(text)) return text;
  return text.slice(0, ends.lastIndex);
}

/** Return the delimiter that splits most lines alike, and into most cells. */
function delimiterOf(head) {
  let best = ",", alikeMost = 0, cellsMost = 0;
  for (const delimiter of Object.keys(DELIMITERS)) {
    const counts = [...recordsOf(head, delimiter, null)].map(({ cells }) => cells.length);
    if (!(counts[0] > 1)) continue;
    const alike = counts.filter((count) => count === counts[0]).length / counts.length;
    if (alike > alikeMost || (alike === alikeMost && counts[0] > cellsMost)) {
      [best, alikeMost, cellsMost] = [delimiter, alike, counts[0]];
    }
  }
  return best;
}

function checkHeader(source, names, rows) {
  const given = names.filter(Boolean);
  if (given.length && given.every((name) => number(name) !== null || isDecimal(name, ","))) {
    throw new DataError(
      `${source}: the first line holds numbers (${given.slice(0, 4).join(", ")}); add a first line with the columns' names`,
    );
  }
  if (names.length === 1 && names[0].includes(" ")) {
    throw new DataError(`${source}: the header has one cell, '${names[0].slice(0, 60)}'; separate cells by commas`);
  }
  if (!rows.length) throw new DataError(`${source}: has a header and no rows; give a row for each sample`);
}

/** Return the decimal sign of the first rows' numbers. Throws DataError if some have a point, others a comma. */
function decimalOf(source, names, rows, delimiter) {
  if (delimiter === ",") return ".";
  const commas = [], points = [];
  for (const { line, cells } of rows) {
    cells.slice(0, names.length).forEach((cell, place) => {
      const text = cell.trim();
      if (isDecimal(text, ",")) commas.push({ line, name: names[place], text });
      else if (isDecimal(text, ".")) points.push({ line, name: names[place], text });
    });
  }
  if (!commas.length) return ".";
  if (points.length) {
    const [before, after] = commas[0].line <= points[0].line ? [commas[0], points[0]] : [points[0], commas[0]];
    throw new DataError(
      `${source}: line ${after.line}, column ${after.name}: '${after.text}' has another decimal sign than ` +
        `'${before.text}' in line ${before.line}, column ${before.name}; write all alike, without thousands separators`,
    );
  }
  if (commas.every(({ text }) => isGrouped(text) && !/^[+-]*0/.test(text))) {
    const [{ line, name, text }] = commas;
    throw new DataError(
      `${source}: line ${line}, column ${name}: '${text}' has a decimal comma or a thousands separator; write numbers ` +
        "with a decimal point, without thousands separators",
    );
  }
  return ",";
}

/**
 * Yield { line, cells } of each row that is not blank, as Python's csv reader splits them; blanks in front of a cell are
 * left out. source: null where damaged quotation marks are no error.
 */
function* recordsOf(text, delimiter, source) {
  const damaged = (line, what) => new DataError(
    `${source}: line ${line} cannot be split into cells (${what}); close or remove its quotation marks`,
  );
  const isEnd = (character) => character === "\n" || character === "\r";
  let at = 0, line = 1;
  while (at < text.length) {
    const begin = line, cells = [];
    for (let more = true; more;) {
      if (delimiter !== "\t") while (text[at] === " ") at++;
      let cell = "";
      if (text[at] === '"') {
        for (let start = ++at; ; start = at) {
          const close = text.indexOf('"', at);
          if (close < 0) {
            if (source !== null) throw damaged(begin, "unexpected end of data");
            cell += text.slice(start);
            at = text.length;
            break;
          }
          cell += text.slice(start, close);
          at = close + 1;
          if (text[at] !== '"') break;
          cell += '"';
          at++;
        }
        line += cell.match(/\r\n|\r|\n/g)?.length ?? 0;
        if (source !== null && at < text.length && text[at] !== delimiter && !isEnd(text[at])) {
          throw damaged(begin, `'${delimiter}' expected after '"'`);
        }
      }
      const rest = at;
      while (at < text.length && text[at] !== delimiter && !isEnd(text[at])) at++;
      cells.push(cell + text.slice(rest, at));
      more = text[at] === delimiter;
      if (more) at++;
    }
    at += text[at] === "\r" && text[at + 1] === "\n" ? 2 : 1;
    line++;
    if (cells.length > 1 || cells[0].trim()) yield { line: begin, cells };
  }
}

