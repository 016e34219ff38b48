/** What can go wrong on a device, and what follows from it (`edge_sdk/errors.py`). */

/** What was received does not fit the contract. failure: what the coordinator learns of it (`failures.js`). */
export class ProtocolError extends Error {
  constructor(message, failure = "bad-work") {
    super(message);
    this.failure = failure;
  }
}
/** A federation is not what the author of its model has signed. */
export class BadPublication extends ProtocolError {
  constructor(message) {
    super(message, "bad-work/terms");
  }
}
/** A payload that is not what this model's can be. */
export class BundleError extends ProtocolError {
  constructor(message, failure = "bad-payload") {
    super(message, failure);
  }
}
/** Training gave no finite loss or weights: the round has failed, nothing of it is kept or sent. */
export class TrainingDiverged extends Error {
  constructor(message, failure = "training-diverged") {
    super(message);
    this.failure = failure;
  }
}
/** The work is handed back: `reason` is a word of the contract, or a failure. */
export class Paused extends Error {
  constructor(reason) {
    super(reason);
    this.reason = reason;
  }
}

/** The coordinator's refusal. type: that of its problem document; what a caller can do about it depends on that. */
export class Refused extends Error {
  failure = "coordinator-fault";

  constructor(status, type, detail) {
    super(detail);
    this.status = status;
    this.type = type;
  }

  /** Whether the refusal is of one of these types. */
  is(...types) {
    return types.includes(this.type);
  }

  /** Whether the round went on without this device, or has another update. */
  get roundOver() {
    return this.is("RoundClosed", "DifferentUpdate");
  }

  /** Whether it concerns the device itself: it ends, while after any other refusal it tries again. */
  get final() {
    return this.is("NotAuthenticated", "NotAllowed", "CrossSite", "WrongHost", "NameTaken", "Finished", "FederationDeleted");
  }
}

/** The caller has stopped this. */
export class Stopped extends Error {}

/** Data of the user that cannot be used; the text says what was met, what was wanted and what to do. */
export class DataError extends Error {
  name = "DataError";
  failure = "data-unusable";
}
