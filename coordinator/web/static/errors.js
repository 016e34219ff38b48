/** What can go wrong on a device, and what follows from it (`edge_sdk/errors.py`). */

/** failure: what the coordinator learns of an error (`failures.js`); its class has the usual one. */
class Reported extends Error {
  constructor(message, failure = new.target.failure) {
    super(message);
    this.failure = failure;
  }
}

/** What was received does not fit the contract. */
export class ProtocolError extends Reported {
  static failure = "bad-work";
}
/** A federation is not what the author of its model has signed. */
export class BadPublication extends ProtocolError {
  static failure = "bad-work/terms";
}
/** A payload that is not what this model's can be. */
export class BundleError extends ProtocolError {
  static failure = "bad-payload";
}
/** Training gave no finite loss or weights: the round has failed, nothing of it is kept or sent. */
export class TrainingDiverged extends Reported {
  static failure = "training-diverged";
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
