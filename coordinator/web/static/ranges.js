/** Ranges of settings that an author has signed: `sparrow/protocol/ranges.py`. A range is { least, most } or { only }. */

/** Settings that change what an update holds, or among how many it is hidden. */
export const BINDING = [
  "method", "optimizer", "learning_rate", "learning_rate_decay", "logit_adjustment", "logit_adjustment_from", "momentum", "weight_decay",
  "batch_size", "local_epochs", "local_steps", "clip", "update_clip", "noise_multiplier", "privacy_adjacency", "secure",
  "secure_bits", "secure_range", "secure_colluders", "secure_metrics", "precision", "seed", "draws", "cohort",
  "finetune_epochs", "finetune_learning_rate",
];
/** Binding settings that an operator may change while a federation runs. */
export const OPERATORS = ["cohort"];
const OWN = "method_settings.";

/** Return the settings that change what an update holds, Map name -> value, those of the method among them. */
export function binding(settings) {
  const found = new Map(BINDING.map((name) => [name, settings[name] ?? null]));
  found.set("secure_metrics", settings.secure === true && settings.secure_metrics !== false);
  for (const name of Object.keys(settings.method_settings ?? {}).sort()) {
    found.set(OWN + name, settings.method_settings[name] ?? null);
  }
  return found;
}

/** Return what of some settings lies outside of ranges, Map name -> range, as sentences. */
export function faults(ranges, settings) {
  const has = binding(settings), found = [];
  for (const [name, allowed] of ranges) {
    const value = has.get(name) ?? null;
    // A number of steps is known only with the data: the device counts them before it trains.
    const counted = name === "local_steps" && value === null && !allowed.only;
    if (!counted && !holds(name, allowed, value)) found.push(`${name} is ${shown(value)}, allowed is ${textOf(name, allowed)}`);
  }
  return found;
}

function holds(name, { least = -Infinity, most = Infinity, only = null }, value) {
  if (only) return only.some((each) => each === value);
  // A long seed is kept as text, which loses nothing; bounds need no more than its size.
  const number = name === "seed" && typeof value === "string" ? Number(value) : value;
  return typeof number === "number" && number >= least && number <= most;
}

/** Return the fewest local steps of a round that ranges allow. */
export const leastSteps = (ranges) => Math.trunc(ranges.get("local_steps")?.least ?? 0);

/** Return a value as a person writes it. */
export const shown = (value) => (value === null ? "none" : String(value));

function textOf(name, { least, most, only }) {
  if (only) return `${name}=${only.map(shown).join(",")}`;
  const bounds = [[">=", least], ["<=", most]].filter(([, bound]) => bound !== undefined);
  return bounds.map(([sign, bound]) => `${name}${sign}${bound}`).join(" and ");
}
