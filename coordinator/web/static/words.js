// Formats of words and numbers, and helpers to build elements.

/** The element with this id. */
export const $ = (id) => document.getElementById(id);

const SPACE = "\u00a0"; // a number stays with its unit

/**
 * Make an element.
 * @param {string} tag
 * @param {Object<string, string|boolean|number|null>} attributes true: there without a value; false and null: left out
 * @param {...(Node|string)} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Set the text of an element if it differs, because screen readers announce every change. */
export function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Show a text in an element; hide the element if there is none. */
export function show(target, text) {
  target.hidden = !text;
  put(target, text ?? "");
}

/** "1 picture", "1,200 pictures". */
export const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

/** Return the first `most` names for a message, separated by commas. */
export const some = (names, most = 8) => {
  const short = names.slice(0, most).map((name) => name.trim().replace(/\s+/g, " "));
  return short.join(", ") + (names.length > most ? ", ..." : "");
};

/** 0.613 -> "61.3 %". */
export const percent = (share) => `${(100 * share).toFixed(1)}${SPACE}%`;

/** Bytes in the unit that fits: 12300 -> "12.3 kB". */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB"];
  let [value, unit] = [count, 0];
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${Number(value.toFixed(unit === 0 || value >= 100 ? 0 : 1))}${SPACE}${units[unit]}`;
}

/** Seconds in the unit that fits: 150 -> "2.5 min". */
export function seconds(count) {
  const [size, unit] = [[3600, "h"], [60, "min"]].find(([size]) => count >= 2 * size) ?? [1, "s"];
  return `${Number((count / size).toFixed(count < 10 || size > 1 ? 1 : 0))}${SPACE}${unit}`;
}

/** Milliseconds of one step: 3.14 -> "3.1 ms". */
export const milliseconds = (count) => `${count.toFixed(count < 10 ? 1 : 0)}${SPACE}ms`;

const NAMES = {
  cifar10: ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
  har: ["seated", "standing up", "walking", "turning", "sitting down"],
};

/** The task without the name of its model: "mnist:leaf" -> "mnist". */
export const familyOf = (task) => task.split(":")[0];

/** Whether the samples of a task are handwritten: light ink on a dark ground, placed as in its data set. */
export const isHandwriting = (task) => ["digits", "mnist"].includes(familyOf(task));

/**
 * The names of a task's classes.
 * @param {string} task
 * @param {number} count
 * @param {string[]} names the federation's own names, if it has any
 * @returns {string[]} of `count` names; "class 0" and so on if they are not known
 */
export function classNames(task, count, names = []) {
  if (names.length) return Array.from({ length: count }, (_, label) => names[label] || `unnamed ${label}`);
  const known = isHandwriting(task) ? [..."0123456789"] : NAMES[familyOf(task)];
  return Array.from({ length: count }, (_, label) => known?.[label] ?? `class ${label}`);
}
