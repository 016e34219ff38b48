/**
 * The failures that a device reports: all that a coordinator learns of an error here, `TYPE` or `TYPE/CODE`. The text of an
 * error may hold a file's name or a value of the data, so it stays in this browser. `sparrow/protocol/failures.py` has the
 * same list, with a sentence for each.
 */
export const FAILURES = [
  "training-diverged", "training-diverged/loss", "training-diverged/weights", "training-diverged/held-out",
  "training-diverged/inputs", "training-diverged/gradients", "training-diverged/values", "unsound-model",
  "bad-payload", "bad-payload/damaged", "bad-payload/size", "bad-work", "bad-work/manifest", "bad-work/graph", "bad-work/cost",
  "bad-work/unmasked", "bad-work/terms", "bad-work/implausible", "unknown-work", "unknown-work/settings", "unknown-work/torch", "unknown-work/curvature",
  "budget-too-small", "secure-refused", "secure-refused/state", "secure-refused/demands",
  "secure-refused/model", "secure-refused/parts", "secure-refused/keys", "secure-refused/weight", "secure-refused/rounding", "model-replaced", "no-memory",
  "no-space", "data-unusable", "update-refused", "coordinator-fault", "interrupted", "interrupted/user",
  "interrupted/program", "interrupted/paused", "interrupted/hidden", "interrupted/left", "nothing-trained",
  "program-error", "program-error/other", "other",
];

/** Words of the contract for a pause by the device's policy, as far as a page has them. */
export const PAUSES = ["charging", "battery", "network"];

const BUILTIN = [TypeError, RangeError, ReferenceError, SyntaxError, EvalError, URIError];
const PROGRAM_ERRORS = BUILTIN.map(({ name }) => `program-error/${name}`);

/** Return what the coordinator learns of an error. */
export function failureOf(error) {
  if (error?.failure) return reported(error.failure);
  if (error?.name === "QuotaExceededError") return "no-space";
  if (error?.constructor === Error) return "other"; // of this page's own
  return reported(`program-error/${error?.constructor?.name}`, "program-error/other");
}

/** Return a reason as it may be sent: a word of these lists, or `otherwise` in place of any other text. */
export function reported(reason, otherwise = "other") {
  return [...FAILURES, ...PAUSES, ...PROGRAM_ERRORS].includes(reason) ? reason : otherwise;
}
