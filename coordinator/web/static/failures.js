/**
 * The failures that a device reports, `TYPE` or `TYPE/CODE`: the only information about an error that a coordinator gets.
 * An error's text may contain file names or data, so it stays in this browser. `sparrow/protocol/failures.py` has the same
 * list, with an explanation of each.
 */
export const FAILURES = [
  "training-diverged", "training-diverged/loss", "training-diverged/weights", "training-diverged/held-out",
  "training-diverged/inputs", "training-diverged/gradients", "training-diverged/values", "unsound-model",
  "bad-payload", "bad-payload/damaged", "bad-payload/size", "bad-work", "bad-work/manifest", "bad-work/graph", "bad-work/cost",
  "bad-work/unmasked", "bad-work/terms", "bad-work/implausible", "unknown-work", "unknown-work/settings", "unknown-work/torch", "unknown-work/curvature",
  "budget-too-small", "secure-refused", "secure-refused/state", "secure-refused/demands",
  "secure-refused/model", "secure-refused/parts", "secure-refused/keys", "secure-refused/weight", "secure-refused/rounding", "model-replaced", "no-memory",
  "no-space", "data-unusable", "data-unusable/values", "state-copied", "cannot-train", "update-refused", "coordinator-fault", "interrupted", "interrupted/user",
  "interrupted/program", "interrupted/paused", "interrupted/hidden", "interrupted/left", "nothing-trained",
  "program-error", "program-error/other", "other",
];

/** The reasons for a pause by the device's policy that a page can detect. */
export const PAUSES = ["charging", "battery", "network"];

const BUILTIN = [TypeError, RangeError, ReferenceError, SyntaxError, EvalError, URIError];
const PROGRAM_ERRORS = BUILTIN.map(({ name }) => `program-error/${name}`);

/** Return the failure to report for an error. */
export function failureOf(error) {
  if (error?.failure) return reported(error.failure);
  if (error?.name === "QuotaExceededError") return "no-space";
  // The page's own errors are plain ones.
  if (error?.constructor === Error) return "other";
  return reported(`program-error/${error?.constructor?.name}`, "program-error/other");
}

/** Return a reason that is in these lists, or `otherwise`: no other text may be sent. */
export function reported(reason, otherwise = "other") {
  return [...FAILURES, ...PAUSES, ...PROGRAM_ERRORS].includes(reason) ? reason : otherwise;
}
