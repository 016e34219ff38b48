/** Cells of a table to numbers: `sparrow/reading/numbers.py`. */

/** Cells without a value, in lower case. */
const MISSING = new Set(["", "?", "na", "n/a", "nan", "null", "none", "-"]);

const DECIMAL = { ".": /^[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?$/i, ",": /^[+-]?(\d+,\d*|,\d+)(e[+-]?\d+)?$/i };
const GROUPED = /^[+-]?\d{1,3}(?:([ \u00a0\u2009\u202f'\u2019.,])\d{3})(?:\1\d{3})*([.,]\d+)?$/;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** Return whether a cell says that there is no value. */
export const isMissing = (text) => MISSING.has(text.trim().toLowerCase());

/** Return whether the text is a number written with this decimal sign. */
export const isDecimal = (text, sign) => DECIMAL[sign].test(text);

/** Return whether the text looks like a number with a thousands separator. */
export const isGrouped = (text) => GROUPED.test(text);

/** Return whether the text is an integer in decimal digits. */
export const isInteger = (text) => /^[+-]?\d+$/.test(text);

/** Return a cell's number, NaN if it is missing, null if it is neither. */
export function number(text, decimal = ".") {
  const cell = text.trim();
  if (MISSING.has(cell.toLowerCase()) || /^[+-]nan$/i.test(cell)) return NaN;
  if (decimal === "," && cell.includes(".")) return null;
  const written = decimal === "," ? cell.replace(",", ".") : cell;
  if (NUMBER.test(written)) return Number(written);
  return /^[+-]?inf(inity)?$/i.test(written) ? (written[0] === "-" ? -Infinity : Infinity) : null;
}
