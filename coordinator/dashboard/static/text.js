// Words and numbers of the page.

export const DOING = {
  training: "training", evaluating: "evaluating", ready: "ready, not drawn", resting: "resting: handed its work back, or was refused",
  paused: "paused by its policy", away: "away: missed a deadline, fell silent or left", small_budget: "budget too small",
  stopped: "stopped early", revoked: "revoked", done: "done: the federation has ended",
  untrained: "trained nothing: it handed its work back", offline: "offline", not_joined: "could not join",
  not_selected: "not selected: its tags are not in cohort_where",
};
const PAUSED = {
  charging: "not charging", battery: "battery low", heat: "too hot", throttled: "throttled", power: "power low",
  network: "network metered", load: "busy", memory: "memory short", storage: "storage short", hours: "outside its hours",
  energy: "energy spent",
};

const SPACE = "\u00a0"; // a number stays with its unit

function scaled(value, units, step) {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) [value, unit] = [value / step, unit + 1];
  const digits = value === 0 || Math.abs(value) >= 100 || (unit === 0 && Number.isInteger(value)) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${Number(value.toFixed(digits))}${SPACE}${units[unit]}`;
}
export const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
export const joules = (value) => scaled(value, ["J", "kJ", "MJ", "GJ"], 1000);
export const percent = (value) => `${(100 * value).toFixed(1)}${SPACE}%`;
export const points = (value) => `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)} points`;
export const plain = (value) => String(Number(value.toPrecision(3)));
export const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

export function seconds(value) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => value >= 2 * size) ?? [1, "s"];
  return `${Number((value / size).toFixed(size > 1 ? 1 : value < 10 ? 2 : 0))}${SPACE}${unit}`;
}

// --- times ------------------------------------------------------------------------------------------------------------

let skew = 0; // the coordinator's clock less ours, ms

/** The coordinator's clock says this. */
export function setClock(iso) {
  skew = Date.parse(iso) - Date.now();
}

/** Seconds from now to then; negative for what is past. */
export const until = (iso) => (Date.parse(iso) - Date.now() - skew) / 1000;
export const since = (iso) => Math.max(0, -until(iso));

export const ago = (iso) => `${past(iso)} ago`;

/** How long ago that was. */
export function past(iso) {
  const taken = since(iso);
  return taken < 60 ? "less than a minute" : seconds(taken);
}

// --- devices ----------------------------------------------------------------------------------------------------------

/** What a device is doing. smallest: the budget below which none is drawn. */
export function whatOf(device, smallest) {
  if (device.doing === "stopped") return `stopped at round ${device.stopped_round}`;
  if (device.doing === "paused") return `paused: ${PAUSED[device.paused] ?? device.paused}`;
  if (device.doing === "small_budget") return smallest == null ? DOING.small_budget : `budget below the ${smallest} that is needed`;
  return DOING[device.doing] ?? device.doing;
}

/** A device's tags in a line, such as "board=orin site=lab". */
export const tagsOf = ({ tags }) => Object.keys(tags).sort().map((key) => `${key}=${tags[key]}`).join(" ");

/** Why a device fails, in which work the last time, and since when. */
export function whyOf({ failure }) {
  return `${failure.reason}${failure.round ? ` (${failure.kind}, round ${failure.round})` : ""}, since ${past(failure.at)}`;
}

export const refusedOf = ({ refusals }) => `refused in a row: ${many(refusals, "update")}`;
