/** Errors on a device, by the reaction to them (`edge_sdk/errors.py`). */

/** failure: the failure to report (`failures.js`); by default that of the class. */
class Reported extends Error {
  constructor(message, failure = new.target.failure) {
    super(message);
    this.failure = failure;
  }
}

/** A message does not follow the contract. */
export class ProtocolError extends Reported {
  static failure = "bad-work";
}
/** A federation differs from what the author of its model signed. */
export class BadPublication extends ProtocolError {
  static failure = "bad-work/terms";
}
/** A payload that is not valid for this model. */
export class BundleError extends ProtocolError {
  static failure = "bad-payload";
}
/** Training gave no finite loss or weights; the round failed, and its results are neither kept nor sent. */
export class TrainingDiverged extends Reported {
  static failure = "training-diverged";
}
/** The work is returned. reason: a reason of the contract, or a failure. */
export class Paused extends Error {
  constructor(reason) {
    super(reason);
    this.reason = reason;
  }
}

/** The coordinator refused a call. type: that of its problem document, on which the caller's reaction depends. */
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

  /** Whether the round continued without this device, or has another update. */
  get roundOver() {
    return this.is("RoundClosed", "DifferentUpdate");
  }

  /** Whether the device ends; after any other refusal it retries. */
  get final() {
    return this.is(
      "NotAuthenticated", "NotAllowed", "CrossSite", "WrongHost", "NameTaken", "Finished", "FederationDeleted", "Blocked");
  }
}

/** The coordinator uses another version of the HTTP contract than this page. */
export class OtherVersion extends Error {
  failure = "coordinator-fault";
  final = true;
}

/** The caller interrupted a call or a wait. */
export class Stopped extends Error {}

/** The user's data cannot be used; the message has the cause and the remedy. */
export class DataError extends Error {
  name = "DataError";
  failure = "data-unusable";
}
