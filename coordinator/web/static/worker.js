/**
 * The device behind the page: it keeps samples, runs the session and reports its state. Messages of the page have a `do`,
 * messages of the worker a `say`; see `COMMANDS` and `report`.
 */
import { threads } from "./engine.js";
import { DataError, Paused, Stopped } from "./errors.js";
import { failureOf } from "./failures.js";
import { readSamples } from "./files.js";
import { compose, fillSkeleton } from "./onnx.js";
import { Batches, EVALUATION_BATCH, fromFolder, gathered } from "./samples.js";
import { Session } from "./session.js";
import { grouped, isFingerprint } from "./signatures.js";
import { Store } from "./store.js";
import { Transport } from "./transport.js";

const REPORT_MILLISECONDS = 100, YIELD_MILLISECONDS = 40, LOOK_SECONDS = 0.25;
const GOODBYE_SECONDS = 5;
const LEAST_SAMPLES = 10;
const MOST_FIELDS = 100, MOST_CHOICES = 1000; // of a table whose rows are typed in
/** Uses of the samples, or groups of samples, of one class, in turn; each class begins three places later. */
const TURNS = ["train", "test", "train", "validation", "train", "train", "test", "train", "train", "test"];

let store, transport, session, samples = null;
let prepared = null; // { samples, digest, parts }: the samples as inputs of the preparation of this digest
let pausedFor = null; // reason for the pause that the page wants
let leaving = false;
let refreshing = null; // the fetch of a federation that was opened without its coordinator
let joining = null, running = null; // the first calls of a device, and its loop of rounds
let given = null; // the enrolment token of the page
let pinned = null; // the fingerprint of the publisher that the page's link names
let reportDue = null, yielded = 0, lastStep = null;
const stepTimes = [];

const state = {
  phase: "opening", detail: "opening the federation", federation: null, device: null,
  samples: { train: 0, validation: 0, test: 0, perClass: [], source: "none", said: "", names: null, enough: false, lacks: "" },
  work: null, accuracyBefore: null, accuracyNow: null, accuracyGlobal: null, rounds: 0, bytesDown: 0, bytesUp: 0,
  secondsTraining: 0, stepMilliseconds: null, steps: 0, threads, isolated: self.crossOriginIsolated,
  secure: self.isSecureContext, canPredict: false, frozenBytes: 0, history: [], kept: false,
  signed: null, judged: {}, lastFailure: null, remains: "", offline: false,
};
const NO_SAMPLES = { ...state.samples };

const COMMANDS = {
  open, add, file, folder, clear, join, leave, forget,
  pause: ({ reason }) => pause(reason), resume, predict, export: exportModel,
};
let turn = Promise.resolve();
self.onmessage = ({ data }) => {
  const act = () => COMMANDS[data.do](data);
  // A command before it may wait for the coordinator.
  if (["leave", "forget"].includes(data.do)) stop();
  // Commands that change the samples or the identity run one after the other, others at once.
  const acted = ["pause", "resume", "predict", "export"].includes(data.do) ? act() : (turn = turn.then(act));
  Promise.resolve(acted).catch((error) => {
    if (data.id !== undefined || data.do === "add") say("refused", { id: data.id, detail: error.message });
    else failed(error);
  });
  turn = turn.catch(() => {});
};

const say = (what, more, transfer = []) => self.postMessage({ say: what, ...more }, transfer);

/** Show changes of the state, at most ten times a second. */
function report(changes = {}) {
  Object.assign(state, changes);
  reportDue ??= setTimeout(() => {
    reportDue = null;
    say("state", { state: { ...state, ...counts() } });
  }, REPORT_MILLISECONDS);
}

function counts() {
  if (!session?.progress) return {};
  const { progress, manifest, identity } = session, moved = session.moved();
  return {
    rounds: progress.rounds, steps: progress.steps, secondsTraining: progress.secondsTraining, history: progress.history,
    judged: progress.judged, accuracyBefore: progress.accuracyBefore, accuracyNow: progress.accuracyNow, accuracyGlobal: progress.accuracyGlobal,
    bytesDown: moved.bytes_down, bytesUp: moved.bytes_up, frozenBytes: session.info.frozen_bytes,
    device: identity && { name: identity.name, budget: identity.budget, enrolled: identity.token !== null },
    canPredict: Boolean(manifest && session.bestTensors()), signed: session.trust.line, offline: session.stale,
    stepMilliseconds: stepTimes.length ? [...stepTimes].sort((a, b) => a - b)[stepTimes.length >> 1] : null,
  };
}

/** Type of a refusal -> a message for users of the page; the coordinator's is for users of the SDK. */
const IN_WORDS = {
  NameTaken: "another device of this federation has this name; choose a different one",
  NotFound: "no federation has this name; ask for a new link",
  FederationDeleted: "the operator deleted this federation; your samples and model stay in this browser until you " +
    'choose "Forget me"',
};

function inWords({ type, message }) {
  if (type !== "NotAuthenticated") return IN_WORDS[type] ?? message;
  if (transport.token !== given) return 'the operator removed this device; choose "Forget me" to take part again';
  return "this link has no valid enrolment token; open the complete link that you received, or ask for a new one";
}

function failed(error) {
  if (error instanceof Stopped) return;
  report({ phase: "failed", detail: inWords(error), lastFailure: null, work: null });
}

// --- opening, and the samples ------------------------------------------------------------------------------------------

async function open({ federation, token, publisher = null }) {
  await alone(federation);
  store ??= await Store.open(federation);
  given = token;
  pinned = publisher;
  if (publisher !== null) {
    if (!isFingerprint(publisher)) throw new Error(NO_FINGERPRINT);
    await store.put({ publisher: grouped(publisher) });
  }
  samples = (await store.get("samples")) ?? null;
  const kept = await Promise.all(["identity", "trust"].map((key) => store.get(key)));
  report({ kept: samples !== null || kept.some((each) => each !== undefined) });
  transport = new Transport((reason, seconds) =>
    report({ detail: `${reason}; retrying in ${Math.max(1, Math.round(seconds))} s` }));
  transport.token = token;
  session = null;
  const only = (await store.get("publisher")) ?? null; // also if the page is opened again without the link
  const opening = new Session(federation, { transport, store, data, tell, checkpoint, publisher: only });
  await opening.open();
  session = opening;
  await opened({ phase: "ready", detail: "" });
  if (session.stale) refresh().catch(failed);
  const { identity } = session;
  // Samples can be added while it waits for the coordinator.
  if (identity?.token && !identity.left && state.samples.enough) join(identity).catch(failed);
}

/** Fetch a federation that was opened without its coordinator. */
function refresh() {
  refreshing ??= session.refresh().then(() => opened()).finally(() => (refreshing = null));
  return refreshing;
}

/** Show the federation with other changes of the state; samples that do not fit it are deleted. */
async function opened(changes = {}) {
  const { info, manifest } = session;
  const others = samples !== null && !fits(samples);
  if (others) await keep(null);
  report({
    ...changes, ...(others ? { detail: OTHER_SAMPLES } : {}),
    federation: {
      name: info.name, task: info.task, method: info.method, status: info.status, round: info.round, rounds: info.rounds,
      inputShape: manifest.inputShape, outputShape: manifest.outputShape, ...inWordsOf(manifest), parameters: info.parameters,
      global: info.global_model_usable, operator: info.settings.operator ?? "", purpose: info.settings.purpose ?? "",
    },
    samples: counted(),
  });
}

/** Return the parts of a preparation and of targets that the screen shows. columns: empty if there are too many to type in. */
function inWordsOf({ preparation, targets }) {
  const { reader, dtype, shape, axes, free, rate, columns } = preparation ?? { columns: [] };
  const few = columns.length <= MOST_FIELDS && columns.flatMap(({ categories }) => categories).length <= MOST_CHOICES;
  return {
    raw: preparation && { reader, dtype, shape, axes, free, rate }, columns: few ? columns : [],
    names: targets?.names ?? [], column: targets?.column ?? null,
  };
}

const NO_FINGERPRINT = "the publisher in this link is not a fingerprint; open the complete link that you received, or ask for a " +
  "new one";
const OTHER_SAMPLES = "the federation now takes other samples; give yours again";

/** Return whether samples have the form and the classes of the federation. */
const fits = ({ of = null }) => of === session.manifest.samplesDigest;

/** Lock this federation for this tab. Throws Error if another tab has it. */
let held = null;
function alone(federation) {
  held ??= navigator.locks ? lock(`sparrow ${federation}`) : ask(`sparrow ${federation}`);
  return held.catch((error) => {
    held = null;
    throw error;
  });
}

const IN_ANOTHER_TAB = "this federation is open in another tab of this browser; continue there, or close that tab";

function lock(name) {
  return new Promise((resolve, reject) => {
    navigator.locks.request(name, { ifAvailable: true }, (got) => {
      if (!got) return reject(new Error(IN_ANOTHER_TAB));
      resolve();
      return new Promise(() => {}); // until the page is closed
    });
  });
}

/** As `lock`, over plain HTTP, which has no locks: other tabs answer. */
function ask(name) {
  const channel = new BroadcastChannel(name);
  return new Promise((resolve, reject) => {
    const alone = setTimeout(() => {
      channel.onmessage = ({ data }) => data !== "here" && channel.postMessage("here");
      resolve();
    }, 200);
    channel.onmessage = ({ data }) => {
      if (data !== "here") return;
      clearTimeout(alone);
      channel.close();
      reject(new Error(IN_ANOTHER_TAB));
    };
    channel.postMessage("is anybody here?");
  });
}

/**
 * Add samples. inputs: their values in one array, or an array of samples of different sizes. group: shared by samples that
 * overlap, such as a recording's windows, which all get the same use.
 */
async function add({ inputs, targets, group }) {
  const { samplesDigest: of } = session.manifest, nothing = { inputs: inputs.slice(0, 0), targets: new Int32Array(), groups: [] };
  const before = samples?.source === "added" && fits(samples) ? samples : nothing;
  const all = { source: "added", inputs: joined(before.inputs, inputs), size: inputs.length / targets.length, of };
  all.targets = Int32Array.from([...before.targets, ...targets]);
  all.groups = [...before.groups, ...Array.from(targets, (_, place) => group ?? `${before.targets.length + place}`)];
  await keep(all);
}

function joined(one, other) {
  if (Array.isArray(one)) return [...one, ...other];
  const both = new one.constructor(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}

/** Use the samples of a file, split by `seed`. */
async function file({ id, file, seed = anySeed() }) {
  return take(id, await readSamples(file, session.manifest, BigInt(seed)));
}

/** Use the samples of a folder as `readFolder` returns it, split by `seed`. */
function folder({ id, read, seed = anySeed() }) {
  return take(id, fromFolder(read, session.manifest, BigInt(seed)));
}

const anySeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

async function take(id, { names, said, train, validation, test }) {
  await keep({ source: "files", parts: { train, validation, test }, names, said, of: session.manifest.samplesDigest });
  say("read", { id, said });
}

function clear() {
  return keep(null);
}

async function keep(changed) {
  samples = changed;
  await store.put({ samples: changed ?? undefined });
  report({ samples: counted() });
}

/** Return the samples of each use, { inputs, targets, count } or null. */
function parts() {
  if (samples?.source !== "added") return samples?.parts ?? { train: null, validation: null, test: null };
  const { inputs, targets, groups, size } = samples, chosen = { train: [], validation: [], test: [] };
  const seen = [], uses = new Map();
  targets.forEach((label, place) => {
    if (!uses.has(groups[place])) {
      seen[label] = (seen[label] ?? 0) + 1;
      uses.set(groups[place], TURNS[(seen[label] - 1 + 3 * label) % TURNS.length]);
    }
    chosen[uses.get(groups[place])].push(place);
  });
  return Object.fromEntries(Object.entries(chosen).map(([use, places]) => [use, places.length ? {
    inputs: gathered(inputs, size, places),
    targets: Int32Array.from(places, (place) => targets[place]), count: places.length,
  } : null]));
}

function counted() {
  const { train, validation, test } = parts(), classes = session.manifest.outputShape[0] ?? 0;
  const perClass = new Array(classes).fill(0);
  for (const part of [train, validation, test]) for (const label of part?.targets ?? []) perClass[label] += 1;
  const [one, two, three] = [train, validation, test].map((part) => part?.count ?? 0);
  const all = one + two + three, added = samples?.source !== "files";
  const { said = "", names = null } = samples ?? {};
  const enough = one > 0 && two > 0 && (!added || (three > 0 && all >= LEAST_SAMPLES));
  const missing = Math.max(1, LEAST_SAMPLES - all);
  const lacks = enough ? "" : `${missing} more ${missing > 1 ? "samples are" : "sample is"} needed to take part`;
  return { train: one, validation: two, test: three, perClass, source: samples?.source ?? "none", said, names, enough, lacks };
}

/** Return the samples in batches, as inputs of the model. They are prepared once for each preparation. */
async function data() {
  const { engine, info, manifest } = session, digest = manifest.files.get("preparation") ?? null;
  if (samples && !fits(samples)) throw new DataError(OTHER_SAMPLES);
  if (prepared?.samples !== samples || prepared?.digest !== digest) {
    const of = samples, made = {};
    for (const [use, part] of Object.entries(parts())) {
      made[use] = part && digest ? { ...part, inputs: await engine.prepare(part) } : part;
    }
    prepared = { samples: of, digest, parts: made };
  }
  const { train, validation, test } = prepared.parts;
  return {
    train: new Batches(train, info.settings.batch_size),
    validation: new Batches(validation, EVALUATION_BATCH),
    test: test && new Batches(test, EVALUATION_BATCH),
  };
}

// --- taking part -------------------------------------------------------------------------------------------------------

async function join(given) {
  // A loop that has failed may still hand its work back.
  if (state.phase === "failed") await running;
  if (running) return;
  joining ??= begin(given).finally(() => (joining = null));
  await joining;
}

async function begin({ name, budget }) {
  leaving = false;
  report({ phase: "joining", detail: "joining the federation" });
  if (session.stale) await refresh();
  if (!state.samples.enough) throw new Error(state.samples.lacks);
  await session.join(name, budget);
  await session.keepIdentity({ left: false });
  running = rounds().catch(breakOff).finally(() => (running = null));
}

async function rounds() {
  let outcome = "worked";
  while (outcome !== "over" && !leaving) {
    if (pausedFor) await stayAway();
    if (leaving) break;
    try {
      const { rounds } = session.progress;
      outcome = await session.step();
      report({ work: null, ...(session.progress.rounds > rounds ? { lastFailure: null } : {}) });
    } catch (error) {
      if (!(error instanceof Stopped)) throw error;
    }
  }
  if (outcome !== "over") return;
  const { status, round } = await transport.federation(session.federation);
  report({
    phase: "finished", detail: "the federation has ended; your model stays in this browser", work: null,
    federation: { ...state.federation, status, round },
  });
}

/** End after an error that no retry can fix; open work is returned, so that no round waits for it. */
async function breakOff(error) {
  failed(error);
  await goodbye(failureOf(error));
}

/** Return open work and mark the device unavailable, within a few seconds. */
async function goodbye(reason) {
  const { working } = session;
  session.working = null;
  const say = async () => {
    if (working) await session.giveUp(working, reason);
    await session.away(reason);
  };
  await Promise.race([say().catch(() => {}), sleep(GOODBYE_SECONDS)]);
  transport.interrupt();
}

/** Show changes of the session. failure: a message that stays until a round succeeds. */
function tell({ failure, notice, ...changes }) {
  const said = failure ?? notice;
  report({ ...(said ? { detail: said } : {}), ...changes, ...(failure ? { lastFailure: failure } : {}) });
  if (changes.work) state.federation = { ...state.federation, round: changes.work.round };
}

/** Pause between steps if the user or a condition asks for it; returns the seconds paused. Throws Paused, Stopped. */
async function checkpoint(left) {
  const now = performance.now();
  if (lastStep !== null) stepTimes.push(now - lastStep);
  if (stepTimes.length > 50) stepTimes.shift();
  if (leaving) throw new Stopped();
  let paused = 0;
  if (pausedFor) {
    const reason = pausedFor, { phase, detail } = state;
    report({ phase: "paused", detail: `paused during a round: ${WHY[reason] ?? reason}` });
    for (; pausedFor && !leaving; paused += LOOK_SECONDS) {
      if (paused >= left) throw new Paused(WORDS[reason]);
      await sleep(LOOK_SECONDS);
    }
    report({ phase, detail });
  } else if (now - yielded > YIELD_MILLISECONDS) {
    // Messages and heartbeats are handled meanwhile.
    await sleep(0);
    yielded = performance.now();
  }
  lastStep = performance.now();
  return paused;
}

const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

/** Reason of the page -> the reason that is sent; `WHY` has the text that is shown. */
const WORDS = {
  user: "interrupted/paused", charging: "charging", battery: "battery", network: "network", hidden: "interrupted/hidden",
};
const WHY = {
  user: "you pressed Pause", charging: "the device is not charging", battery: "the battery is low",
  network: "the connection is metered", hidden: "this page is in the background",
};

async function stayAway() {
  const reason = pausedFor;
  report({ phase: "paused", detail: `paused: ${WHY[reason] ?? reason}`, work: null });
  await session.away(WORDS[reason]).catch(ignoreStop);
  while (pausedFor && !leaving) await sleep(LOOK_SECONDS);
}

function ignoreStop(error) {
  if (!(error instanceof Stopped)) throw error;
}

function pause(reason) {
  pausedFor = reason;
  if (running && !session.working && !session.progress.pending) transport.interrupt(); // a long poll
}

function resume() {
  pausedFor = null;
}

/** End the loop of rounds and the calls in progress. */
function stop() {
  leaving = true;
  transport?.interrupt();
}

async function leave() {
  stop();
  report({ detail: "leaving", work: null });
  await joining?.catch(() => {});
  await running;
  await goodbye("interrupted/left");
  await session.keepIdentity({ left: true });
  report({ phase: "left", detail: "you left; your model stays in this browser", work: null });
  if (session.stale) refresh().catch(failed);
}

async function forget() {
  const { federation } = store, identity = session?.identity ?? (await store.get("identity"));
  if (session && identity?.token && !identity.left) await leave();
  const remains = identity?.device ? await removed(identity) : "";
  await store.delete();
  store = session = samples = prepared = null;
  report({
    remains, phase: "opening", detail: "everything was deleted", work: null, samples: NO_SAMPLES, device: null, kept: false,
    canPredict: false, accuracyBefore: null, accuracyNow: null, accuracyGlobal: null, judged: {}, lastFailure: null, rounds: 0, history: [],
    signed: null,
  });
  await open({ federation, token: given, publisher: pinned });
}

const REMAINS = (name) => `The coordinator deleted this device. The records of its rounds under the name ${name}, and its ` +
  "part in the shared model, remain.";
const NOTHING_REMAINS = () => "The operator had already deleted the federation with its records and models. Nothing that names this " +
  "device remains at the coordinator, and its samples and model are deleted from this browser. Other devices may still have the " +
  "shared model.";
const UNKNOWN = (name) => `The coordinator could not be asked to delete this device: ask its operator to remove ${name}.`;

/** Delete a device at the coordinator, within a few seconds; returns what remains there. */
async function removed({ name, device, token }) {
  transport.interrupt();
  transport.token = token;
  const call = transport.removeDevice(device).then((there) => (there ? REMAINS : NOTHING_REMAINS), () => UNKNOWN);
  const remains = await Promise.race([call, sleep(GOODBYE_SECONDS).then(() => UNKNOWN)]);
  transport.interrupt();
  return remains(name);
}

// --- using the model ---------------------------------------------------------------------------------------------------

async function predict({ id, input }) {
  const scores = await session.predict(input);
  say("predicted", { id, scores });
}

/** Export the model to ONNX, after the federation's preparation. */
async function exportModel({ id }) {
  const { engine, info, manifest, preparation } = session, tensors = session.bestTensors();
  if (!tensors) throw new Error("there is no model yet; take part in a round first");
  if (session.stale && !(await store.get("skeleton.onnx"))) {
    throw new Error("the first download of the model needs the coordinator; try again when it answers");
  }
  const filled = fillSkeleton(await session.skeleton(), new Map([...tensors, ...engine.frozen]));
  const names = samples?.names ?? manifest.targets?.names ?? [];
  const { buffer } = compose(filled, preparation && (await preparation()), propertiesOf(manifest, names));
  say("exported", { id, name: `${info.name}.onnx`, bytes: buffer }, [buffer]);
}

/** Return the properties of an exported file that describe its inputs and outputs (`export/metadata.py`). */
function propertiesOf({ preparation, targets, outputShape }, names) {
  const found = {};
  const all = Array.from({ length: outputShape[0] }, (_, place) => names[place] ?? "");
  if (names.length) found.class_names = JSON.stringify(all);
  if (targets) found.targets = JSON.stringify({ kind: targets.kind, ...(targets.column ? { column: targets.column } : {}) });
  if (preparation) {
    const { reader, dtype, shape, free, axes, rate, step, columns } = preparation;
    const known = { ...(rate === null ? {} : { rate }), ...(step === null ? {} : { step }) };
    found.preparation = JSON.stringify({ reader, dtype, shape, free, axes, ...known, columns });
  }
  return found;
}
