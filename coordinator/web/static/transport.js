/**
 * HTTP calls to the coordinator, resumable, with retries and byte counts (`edge_sdk/device/transport.py`). Temporary
 * failures are retried, after waits that double; other refusals are thrown as `Refused`. Answers have a maximum length for
 * each call; longer or unreadable ones are retried.
 */
import { OtherVersion, ProtocolError, Refused, Stopped } from "./errors.js";
import { reported } from "./failures.js";
import { digestHex } from "./sha256.js";

const WIRE = 1, WIRE_HEADER = "Sparrow-Wire"; // the version of the HTTP contract: `sparrow/protocol/wire.py`
const FIRST_WAIT = 0.5, LONGEST_WAIT = 30, LONGEST_PAUSE = 900;
const LARGEST_ANSWER = 1024 * 1024, LARGEST_REFUSAL = 64 * 1024;
const LARGEST_PUBLICATION = 2 * (16 + 4) * 1024 * 1024; // of a manifest and a statement, with JSON escapes
const RESUMED = 1024 * 1024;
const SMALLEST_PART = 16 * 1024;
const TIMEOUT = 30, SLOW_SECONDS = 60, SLOWEST = 1024;
const ASSIGNMENT_TYPE = "application/vnd.sparrow.assignment";
const BUNDLE_TYPE = "application/octet-stream";
const JSON_TYPE = "application/json";
const PREFIX = "urn:sparrow:problem:";
const LONG_SEED = /"seed":\s*(\d{16,19})(?![\d.eE])/g; // above 2^53: kept as exact text
/** Statuses with which proxies refuse calls for good -> the remedy (`edge_sdk/device/answers.py`). */
const REMEDIES = {
  403: "let it pass calls with GET, POST, PUT, PATCH and DELETE",
  405: "let it pass calls with GET, POST, PUT, PATCH and DELETE",
  411: "let it pass bodies with a Content-Length",
  413: "raise its limit (nginx: client_max_body_size; Caddy: request_body)",
  414: "raise its limit of an address's length (nginx: large_client_header_buffers)",
  431: "raise its limit of the headers' length (nginx: large_client_header_buffers)",
};
const PASSING = ["Unavailable", "NotReady", "Unreadable", "Damaged", "InternalError", "DiskFull", "TooManyRequests"];

/** The answer is missing, incomplete, or not from a coordinator. */
class NoAnswer extends Error {}

/** One device's calls. onWait(reason, seconds) is called before each wait. */
export class Transport {
  constructor(onWait = () => {}) {
    this.token = null;
    this.onWait = onWait;
    this.traffic = { down: 0, up: 0, frozen: 0 };
    this.renewalDue = false;
    this.brought = null;
    this.stop = new AbortController();
  }

  /** Interrupt the calls in progress and their waits: they throw Stopped. Later calls work as usual. */
  interrupt() {
    this.stop.abort();
    this.stop = new AbortController();
  }

  /** Return a federation's state. kept: returned instead if the coordinator does not answer. */
  federation(name, kept = null) {
    return this.ask("GET", `/v1/federations/${name}`, { check: checkFederation, instead: kept });
  }

  /** Return a federation's publication, unchecked: { publication, manifest: a text or null }. */
  publication(name) {
    return this.ask("GET", `/v1/federations/${name}/publication`, { most: LARGEST_PUBLICATION, check: checkPublished });
  }

  /** Return a file of a federation, such as its manifest, Uint8Array. */
  async file(name, path, most) {
    return (await this.call("GET", `/v1/federations/${name}/${path}`, { most })).bytes;
  }

  /** Return the training step for a share of neurons: { bytes, sha256 }. */
  async step(name, ratio, most) {
    const answer = await this.call("GET", `/v1/federations/${name}/fast-step.onnx?ratio=${ratio}`, { most });
    return { bytes: answer.bytes, sha256: answer.headers.get("ETag")?.replaceAll('"', "") ?? "" };
  }

  /** Return a file of values of `size` bytes; a broken download is resumed. */
  async values(name, which, size) {
    const before = this.traffic.down;
    const body = await this.download(`/v1/federations/${name}/${which}`, size);
    if (which === "frozen") this.traffic.frozen += this.traffic.down - before;
    return body;
  }

  /** Enrol: { device_id, token, notice }. */
  enrol(name, request) {
    return this.ask("POST", `/v1/federations/${name}/devices`, { ...json(request), check: checkEnrolled });
  }

  /** Report a change of the device. */
  changeDevice(id, { conditions, ...change }) {
    if (conditions?.reason !== undefined) conditions = { ...conditions, reason: reported(conditions.reason) };
    return this.call("PATCH", `/v1/devices/${id}`, json({ ...change, ...(conditions ? { conditions } : {}) }));
  }

  /** Delete the device at the coordinator. Returns false if its federation was deleted before. */
  async removeDevice(id) {
    try {
      await this.call("DELETE", `/v1/devices/${id}`);
    } catch (error) {
      if (error instanceof Refused && error.is("FederationDeleted")) return false;
      // It is deleted already.
      if (!(error instanceof Refused && error.is("NotFound", "NotAuthenticated"))) throw error;
    }
    return true;
  }

  /** Return a new token. */
  async newToken(id, key) {
    const path = `/v1/devices/${id}/token`;
    return (await this.ask("POST", path, { ...json({ enrolment_key: key }), check: checkToken })).token;
  }

  /** Ask for work for up to `wait` seconds: { assignment, pause }, one of them null or 0. */
  async assignment(name, wait, cost) {
    const headers = { Accept: ASSIGNMENT_TYPE, ...(cost ? { "Sparrow-Upload-Cost": JSON.stringify(cost) } : {}) };
    const answer = await this.call("GET", `/v1/federations/${name}/assignment?wait=${wait}`,
      { headers, timeout: wait + TIMEOUT, read: (answer) => this.workOf(answer) });
    return answer;
  }

  workOf(answer) {
    this.renewalDue = answer.headers.has("Sparrow-Renew-Token");
    if (answer.status === 204) return { assignment: null, pause: pauseOf(answer, 1) };
    return { assignment: this.withPayload(answer, checkAssignment), pause: 0 };
  }

  /** Return the message of an answer; keep a payload behind it for `payload`. */
  withPayload(answer, check) {
    const along = answer.headers.get("Content-Type") === ASSIGNMENT_TYPE;
    const end = along ? answer.bytes.indexOf(10) : answer.bytes.length;
    const message = check(jsonOf(answer.bytes.subarray(0, end < 0 ? answer.bytes.length : end)));
    const body = along && end >= 0 ? answer.bytes.slice(end + 1) : new Uint8Array();
    const assignment = "assignment_id" in message ? message : message.next;
    this.brought = body.length && assignment ? { id: assignment.assignment_id, body } : null;
    if (this.brought) this.traffic.down -= body.length; // counted when it is taken
    return message;
  }

  /** Return an assignment's bundle, Uint8Array, received with the assignment or downloaded. Throws ProtocolError. */
  async payload(id, { bytes, sha256 }) {
    const brought = this.brought;
    this.brought = null;
    if (brought) this.traffic.down += brought.body.length;
    if (brought?.id === id && brought.body.length === bytes && (await digestHex(brought.body)) === sha256) return brought.body;
    for (let attempt = 0; attempt < 3; attempt++) {
      const body = await this.download(`/v1/assignments/${id}/payload`, bytes);
      if (body.length === bytes && (await digestHex(body)) === sha256) return body;
    }
    throw new ProtocolError("three downloads of the payload did not match its digest", "bad-payload/damaged");
  }

  /** Send a bundle, or JSON (text: true), Uint8Array; returns the next assignment, or null. */
  async update(id, body, text, cost) {
    const headers = {
      "Content-Type": text ? JSON_TYPE : BUNDLE_TYPE, Accept: ASSIGNMENT_TYPE,
      ...(cost ? { "Sparrow-Upload-Cost": JSON.stringify(cost) } : {}),
    };
    const path = `/v1/assignments/${id}/update`;
    const read = (answer) => {
      this.renewalDue ||= answer.headers.has("Sparrow-Renew-Token");
      return this.withPayload(answer, checkAccepted).next ?? null;
    };
    return this.upload(path, body, headers, read);
  }

  /** Send a heartbeat for an assignment; returns whether the round still waits for it. */
  async heartbeat(id) {
    const answer = await this.once("POST", `/v1/assignments/${id}/heartbeat`, { timeout: 10 }).catch(() => null);
    return answer?.status !== 409;
  }

  /** Return an assignment with a reason. It need not be open any more. */
  async handBack(id, reason) {
    await this.call("DELETE", `/v1/assignments/${id}`, json({ reason: reported(reason) })).catch((error) => {
      if (!(error instanceof Refused && (error.roundOver || error.is("NotFound")))) throw error;
    });
  }

  // --- how -----------------------------------------------------------------------------------------------------------

  /** Return the message that answers a call. check(message): throws NoAnswer for a malformed one. */
  ask(method, path, { check, ...options }) {
    return this.call(method, path, { ...options, read: (answer) => check(jsonOf(answer.bytes)) });
  }

  call(method, path, { read = (answer) => answer, instead = null, ...options } = {}) {
    return this.patiently(() => this.once(method, path, options), read, instead);
  }

  /** Send `body`; after an interruption only the missing part, and in parts if a proxy refuses its length (413). */
  async upload(path, body, headers, read) {
    const digest = await digestHex(body);
    const resumes = body.length >= RESUMED;
    let begun = false, first = 0;
    const attempt = async () => {
      if (begun && resumes) {
        const answer = await this.once("GET", `${path}?sha256=${digest}`);
        if (answer.status !== 200) return answer;
        first = Math.min(Number(jsonOf(answer.bytes).received) || 0, body.length);
      }
      begun = true;
      for (;;) {
        const part = body.subarray(first, first + (this.part ?? body.length));
        const range = part.length ? `bytes ${first}-${first + part.length - 1}/${body.length}` : `bytes */${body.length}`;
        const ranged = resumes || part.length < body.length;
        const more = ranged ? { "Sparrow-Update-SHA256": digest, "Content-Range": range } : {};
        const answer = await this.once("PUT", path, { body: part, headers: { ...headers, ...more } });
        if (answer.status === 202) {
          const received = jsonOf(answer.bytes).received;
          if (!(received > first && received < body.length)) throw new NoAnswer("the coordinator's part of the upload changed");
          first = received;
        } else if (answer.status === 413 && !refusalOf(answer) && part.length > SMALLEST_PART) {
          this.part = Math.max(Math.floor(part.length / 2), SMALLEST_PART);
        } else if (answer.status === 416) {
          first = 0;
          throw new NoAnswer("the coordinator's part of the upload changed");
        } else return answer;
      }
    };
    return this.patiently(attempt, read);
  }

  /** Download `size` bytes; after an interruption only the missing part. */
  async download(path, size) {
    const body = new Uint8Array(size);
    let held = 0, etag = "";
    const attempt = async () => {
      const headers = held ? { Range: `bytes=${held}-`, "If-Range": etag } : {};
      return this.once("GET", path, {
        headers,
        most: size,
        take: (status, response) => {
          if (status !== 200 && status !== 206) return null;
          if (status === 200) held = 0;
          etag = response.headers.get("ETag") ?? "";
          return (part) => {
            if (held + part.length > size) throw new NoAnswer("the answer is longer than announced");
            body.set(part, held);
            held += part.length;
          };
        },
      });
    };
    await this.patiently(attempt, (answer) => {
      if (held < size) throw new NoAnswer(`the answer ended after ${held} of ${size} bytes`);
      return answer;
    });
    return body;
  }

  /** Call once: { status, headers, bytes }. take(status, response): a function for the parts of the body, or null. */
  async once(method, path, { body, headers = {}, most = LARGEST_ANSWER, timeout = TIMEOUT, take = () => null } = {}) {
    const abort = new AbortController(), stop = this.stop.signal;
    const ended = () => abort.abort();
    stop.addEventListener("abort", ended);
    let timer = setTimeout(ended, timeout * 1000);
    try {
      if (body) this.traffic.up += body.length;
      // The URL is relative, because a proxy may serve the coordinator below a path.
      const response = await fetch(new URL(`..${path}`, import.meta.url), {
        method, headers: { ...headers, [WIRE_HEADER]: WIRE, ...(this.token ? { Authorization: `Bearer ${this.token}` } : {}) },
        body: body?.length ? body : undefined, signal: abort.signal,
        redirect: "error", credentials: "omit", cache: "no-store", referrerPolicy: "no-referrer",
      });
      checkVersion(response);
      clearTimeout(timer);
      const pace = { begin: Date.now(), bytes: 0 };
      timer = setInterval(() => tooSlow(pace) && ended(), 1000);
      const bytes = await this.read(response, most, take(response.status, response), pace);
      return { status: response.status, headers: response.headers, bytes };
    } catch (error) {
      // Stop the download of a body that is not used.
      ended();
      if (stop.aborted) throw new Stopped();
      if (error instanceof NoAnswer || error instanceof OtherVersion) throw error;
      throw new NoAnswer("the coordinator does not answer");
    } finally {
      clearTimeout(timer);
      clearInterval(timer);
      stop.removeEventListener("abort", ended);
    }
  }

  async read(response, most, given, pace) {
    const limit = response.ok ? most : LARGEST_REFUSAL;
    const parts = [];
    let length = 0;
    const reader = response.body?.getReader();
    for (;;) {
      const { done, value } = reader ? await reader.read() : { done: true };
      if (done) break;
      this.traffic.down += value.length;
      pace.bytes = length += value.length;
      if (length > limit) {
        await reader.cancel();
        throw new NoAnswer(`the answer is longer than ${limit} bytes`);
      }
      if (given) given(value);
      else parts.push(value);
    }
    const bytes = new Uint8Array(given ? 0 : length);
    let next = 0;
    for (const part of parts) {
      bytes.set(part, next);
      next += part.length;
    }
    return bytes;
  }

  /** Repeat a call until it is answered. instead: returned after the first temporary failure, unless null. */
  async patiently(attempt, read, instead = null) {
    for (let longest = FIRST_WAIT; ; longest = Math.min(2 * longest, LONGEST_WAIT)) {
      let pause = 0, reason;
      try {
        const answer = await attempt();
        if (answer.status >= 200 && answer.status < 300) return read(answer);
        const refusal = refusalOf(answer);
        if (refusal && !passes(answer.status, refusal)) throw refusal;
        if (!refusal && answer.status in REMEDIES && instead === null) throw blocked(answer.status);
        reason = refusal?.message ?? `a proxy in front of the coordinator answered with status ${answer.status}`;
        pause = pauseOf(answer, 0);
      } catch (error) {
        if (!(error instanceof NoAnswer)) throw error;
        reason = error.message;
      }
      if (instead !== null) return instead;
      const seconds = pause + Math.random() * Math.max(longest, pause / 4);
      this.onWait(reason, seconds);
      await this.rest(seconds);
    }
  }

  /** Wait; throws Stopped when interrupted. */
  rest(seconds) {
    const stop = this.stop.signal;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, seconds * 1000);
      stop.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(new Stopped());
      }, { once: true });
    });
  }
}

const json = (message) => ({ body: new TextEncoder().encode(JSON.stringify(message)), headers: { "Content-Type": JSON_TYPE } });

function jsonOf(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    const message = JSON.parse(text.replace(LONG_SEED, '"seed":"$1"'));
    if (message !== null && typeof message === "object") return message;
  } catch { /* thrown below */ }
  throw new NoAnswer("the answer is not from a Sparrow coordinator");
}

/** Throw OtherVersion if an answer names another version. Answers of proxies name none. */
function checkVersion({ headers }) {
  const named = headers.get(WIRE_HEADER) ?? "";
  if (!/^\d{1,9}$/.test(named) || Number(named) === WIRE) return;
  throw new OtherVersion(`This page is ${Number(named) < WIRE ? "newer" : "older"} than the coordinator. Reload it.`);
}

function refusalOf({ status, headers, bytes }) {
  if (!headers.get("Content-Type")?.startsWith("application/problem+json")) return null;
  try {
    const said = jsonOf(bytes);
    return new Refused(status, String(said.type).replace(PREFIX, ""), String(said.detail).slice(0, 1000));
  } catch {
    return null;
  }
}

function blocked(status) {
  return new Refused(status, "Blocked", `a proxy or firewall in front of the coordinator refuses a call with status ${status}; ` +
    `use another network, or ask the operator to ${REMEDIES[status]}`);
}

const tooSlow = ({ begin, bytes }) => Date.now() - begin > 1000 * (SLOW_SECONDS + bytes / SLOWEST);

const passes = (status, refusal) => status === 408 || status === 429 || status >= 500 || PASSING.includes(refusal.type);

/** Return the seconds of Retry-After, at most LONGEST_PAUSE. */
function pauseOf({ headers }, usual) {
  const text = headers.get("Retry-After") ?? "";
  return /^\d{1,9}$/.test(text) ? Math.min(Number(text), LONGEST_PAUSE) : usual;
}

const KINDS = ["train", "evaluate", "compare", "personalise", "prepare", "adapt"];
const natural = (value, most) => Number.isInteger(value) && value >= 0 && value <= most;
const matches = (value, pattern) => typeof value === "string" && pattern.test(value);
const digest = (value) => matches(value, /^[0-9a-f]{64}$/);
const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const identifier = /^[A-Za-z0-9_-]{1,64}$/, secret = /^[!-~]{1,200}$/, digits = /^\d{16,19}$/;

/** Return a federation's state. Checks the fields that the page uses. */
function checkFederation(said) {
  const { name, uid, task, method, device_kinds: kinds, manifest_digest: manifest, settings } = said;
  const sound = [name, uid, task, method].every((each) => typeof each === "string") && Array.isArray(kinds) && digest(manifest)
    && isRecord(settings) && natural(settings.batch_size, 1e6) && settings.batch_size > 0 && isSeed(settings.seed)
    && isStrength(settings.logit_adjustment) && [said.publisher, said.publication].every((each) => each == null || digest(each));
  if (!sound) throw new NoAnswer("the federation's description cannot be read; reload this page, which may be out of date");
  return said;
}

function checkPublished({ publication: said, manifest = null }) {
  const sound = isRecord(said) && typeof said.statement === "string" && digest(said.publisher)
    && matches(said.signature, /^[0-9a-f]{128}$/) && (manifest === null || typeof manifest === "string");
  if (!sound) throw new NoAnswer("the publication cannot be read; reload this page, which may be out of date");
  const { statement, publisher, signature } = said;
  return { publication: { statement, publisher, signature }, manifest };
}

function checkEnrolled(said) {
  if (!matches(said.device_id, identifier)) throw new NoAnswer("the answer to the enrolment cannot be read");
  return checkToken(said);
}

function checkToken(said) {
  if (!matches(said.token, secret)) throw new NoAnswer("the new token cannot be read");
  return said;
}

/** Whether a value is a seed: an integer, as text above 2^53. */
const isSeed = (value) => natural(value, 2 ** 53 - 1) || matches(value, digits);

const isStrength = (value) => typeof value === "number" && value >= 0 && value <= 10;

/** Return an assignment. Throws NoAnswer if it does not follow the contract. */
function checkAssignment(said) {
  const { assignment_id: id, kind, round, deadline_seconds: deadline, settings, payload, work, plan } = said;
  const manifest = said.manifest_digest;
  const sound = matches(id, identifier) && KINDS.includes(kind) && natural(round, 1e6)
    && typeof deadline === "number" && deadline >= 0 && deadline <= 8 * 86400 && isRecord(settings)
    && (payload == null || (natural(payload.bytes, 2 ** 53 - 1) && digest(payload.sha256)))
    && (work == null || (matches(work.key, /^[0-9a-f]{32}$/) && typeof work.ratio === "number" && work.ratio > 0 && work.ratio <= 1))
    && (plan == null || isRecord(plan)) && (manifest == null || digest(manifest));
  if (!sound) throw new NoAnswer("the assignment cannot be read; reload this page, which may be out of date");
  checkSettings(settings);
  return said;
}

function checkSettings(settings) {
  const within = (name, least, most, none = false) => (none && settings[name] == null)
    || (typeof settings[name] === "number" && settings[name] >= least && settings[name] <= most);
  const count = (name, least, most, none = false) => within(name, least, most, none)
    && (settings[name] == null || Number.isInteger(settings[name]));
  const oneOf = (name, ...values) => values.includes(settings[name]);
  const sound = within("learning_rate", 0, 100) && within("learning_rate_decay", 0, 1) && count("batch_size", 1, 1e6)
    && count("local_epochs", 1, 1e4) && count("local_steps", 1, 1e7, true) && within("momentum", 0, 1)
    && within("weight_decay", 0, 10) && isStrength(settings.logit_adjustment) && within("logit_adjustment_from", 0, 1)
    && within("clip", 0, 1e12, true) && within("silence_seconds", 1, 7 * 86400)
    && oneOf("optimizer", "sgd", "adam", "adamw") && oneOf("precision", "fp32", "fp16", "bf16", "int8")
    && count("finetune_epochs", 0, 1e4) && within("finetune_learning_rate", 0, 100, true)
    && oneOf("early_stopping", "validation", "paper", "off") && count("patience", 1, 1e4, true)
    && count("min_participations", 1, 1e6) && within("min_improvement", 0, 1) && within("stop_weight", 0, 1)
    && oneOf("personal_model", "best", "last", "fleet") && isSeed(settings.seed) && isRecord(settings.method_settings);
  if (!sound) throw new NoAnswer("the assignment's settings cannot be read; reload this page, which may be out of date");
}

function checkAccepted(said) {
  if (typeof said.new !== "boolean" || !(said.next == null || isRecord(said.next))) throw new NoAnswer("the answer to the update cannot be read");
  if (said.next) checkAssignment(said.next);
  return said;
}
