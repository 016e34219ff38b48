/**
 * One device's session with its coordinator: `edge_sdk/device/session/`. `step` does one task and returns. The state is
 * in the store between steps, so a page may be closed at any moment:
 *
 *     before the state is kept   the assignment is still open: it is sent and trained again, with the same model and the
 *                                same random numbers, and gives the same update
 *     after                      the outbox has the update: it is sent again, byte for byte, and counts once
 */
import { decode, encode, largestPayload } from "./bundle.js";
import { Engine, threads } from "./engine.js";
import { BadPublication, BundleError, Paused, ProtocolError, Refused, Stopped, TrainingDiverged } from "./errors.js";
import { SHARE, SHARES, candidatesOf, choice, evidenceOf, poolOf } from "./evidence.js";
import { failureOf } from "./failures.js";
import { nonzeroFlops } from "./flops.js";
import { MAX_GRAPH, MAX_MANIFEST, Manifest, ownInitialValues, pythonJson, unpackValues, valuesSize } from "./manifest.js";
import { mergeInPlace, pack } from "./masks.js";
import { GLOBAL_SHARES, METHODS, isWhole, mixed, sentValues, wholeModel } from "./methods.js";
import { LabelPrior, adjusts, asksForLabels } from "./prior.js";
import { roundUpdate } from "./rounding.js";
import { Sha256, digestHex, hex, sha256, utf8 } from "./sha256.js";
import { givesWay } from "./stopping.js";
import { Trust } from "./trust.js";

const WAIT_SECONDS = 30, BEATS = 3, RESERVE_SECONDS = 5;
const FIRST_REST = 5, LONGEST_REST = 900;
const MOST_HISTORY = 200;
const LARGEST_SCORE = 3.4028234663852886e38;
const TRAINING = ["train", "personalise"];
const NO_ENERGY = { quality: "unavailable", source: "a browser has no energy sensor" };

const AT_FIRST = {
  rounds: 0, lastRound: 0, steps: 0, stoppedRound: null, adapted: false, accuracyBefore: null, accuracyNow: null,
  accuracyGlobal: null, judged: {}, memory: {}, best: null, pending: null, uploadCost: null, secondsTraining: 0,
  everything: { bytes_down: 0, bytes_up: 0, frozen_down: 0 }, history: [],
};

/**
 * One device in one federation. transport: its calls. store: its state. data(): a promise of the prepared samples,
 * { train, validation, test } as Batches. tell(changes): called with changes of the screen. checkpoint(left): awaited
 * between batches with the seconds until the round's deadline; it may wait, or throw Paused. publisher: the fingerprint
 * of the only publisher to accept, or null.
 */
export class Session {
  constructor(federation, { transport, store, data, tell, checkpoint, publisher = null }) {
    Object.assign(this, { federation, transport, store, data, tell, checkpoint });
    this.trust = new Trust(federation, store, publisher);
    this.enrolmentToken = transport.token;
    this.next = null;
    this.working = null;
    this.faults = 0;
    /** Whether the coordinator did not answer, so that the federation's description is a kept one. */
    this.stale = false;
  }

  /** Read the state kept here, and fetch the federation, or take its kept description. Throws Refused, Error. */
  async open() {
    this.identity = (await this.store.get("identity")) ?? null;
    this.progress = { ...AT_FIRST, ...((await this.store.get("progress")) ?? {}) };
    this.movedBefore = this.progress.everything;
    if (this.identity?.token) this.transport.token = this.identity.token;
    await this.load((await this.store.get("info")) ?? null);
  }

  /** Fetch the federation again after it was opened without its coordinator. Throws Refused, Error. */
  refresh() {
    return this.load(null);
  }

  /** Fetch the federation, or take its kept description, and load model and state. */
  async load(kept) {
    while (!(await this.opened(kept))) await this.transport.rest(this.nextRest);
    this.faults = 0;
    await this.loadState();
    if (this.identity?.previous && !this.stale) await this.settleToken();
  }

  /** Load the federation's model. Returns false if a file does not match its digest. */
  async opened(kept) {
    const info = await this.askForFederation(kept);
    if (this.identity && this.identity.uid !== info.uid) {
      throw new Error(`this browser took part in an earlier federation with the name ${this.federation}; choose "Forget me" first`);
    }
    if (!info.device_kinds.includes("page")) throw new Error(`pages cannot take part: ${info.no_pages_because}`);
    try {
      await this.loadModel(info, info.manifest_digest);
    } catch (error) {
      if (!(error instanceof ProtocolError) || error instanceof BadPublication) throw error;
      this.tell({ failure: error.message, detail: this.again(error.message) });
      return false;
    }
    this.stale = info === kept;
    if (!this.stale) await this.store.put({ info });
    return true;
  }

  async askForFederation(kept) {
    try {
      return await this.transport.federation(this.federation, kept);
    } catch (error) {
      if (!(error instanceof Refused && error.is("TokenExpired"))) throw error;
      this.transport.token = this.enrolmentToken;
      return this.transport.federation(this.federation, kept);
    }
  }

  /**
   * Load manifest, files of values and the engine. Each file is downloaded once and checked against its digest. Throws
   * BadPublication, without any change, for a model that is not the signed one.
   */
  async loadModel(info, digest) {
    const text = await this.cached("manifest.json", digest, "manifest", MAX_MANIFEST);
    const manifest = new Manifest(decoded(text));
    if (!manifest.files.has("step")) throw new Error("the model has no training step; ask its author to publish it again");
    if (this.manifest && this.manifest.valuesDigest !== manifest.valuesDigest) {
      throw new ProtocolError('the federation has another model than before; choose "Forget me" and take part again');
    }
    await this.trust.admit(info, manifest, () => this.transport.publication(this.federation));
    const [frozen, first] = [await this.values(manifest, "frozen"), await this.values(manifest, "first")];
    const own = ownInitialValues(manifest, info.settings.seed, first);
    const graph = (name) => this.cached(`${name}.onnx`, manifest.files.get(name), `${name}.onnx`, MAX_GRAPH);
    await this.engine?.forget();
    if (manifest.preparation) await graph("preparation");
    const graphs = {
      step: (ratio) => this.trainingStep(ratio), evaluation: () => graph("evaluation"), preparation: () => graph("preparation"),
    };
    this.info = info;
    this.manifest = manifest;
    this.engine = new Engine(manifest, graphs, frozen, own);
    this.skeleton = () => graph("skeleton");
    this.preparation = manifest.preparation ? () => graph("preparation") : null;
    this.method = METHODS[this.info.method];
  }

  /** Return the file with this digest, kept or downloaded. Throws ProtocolError if the download does not match. */
  async cached(key, wanted, path, most) {
    const kept = await this.store.get(key);
    if (kept && (await digestHex(kept)) === wanted) return kept;
    const file = await this.transport.file(this.federation, path, most);
    if ((await digestHex(file)) !== wanted) throw new ProtocolError(`${path} does not match its SHA-256; reload this page`, "bad-payload/damaged");
    await this.store.put({ [key]: file });
    return file;
  }

  /**
   * Return the training step for a share of neurons, downloaded once for each share of this model. The coordinator derives
   * it from the signed one. A page cannot check that, so it trusts the coordinator here.
   */
  async trainingStep(ratio) {
    const key = `step ${ratio}`, of = this.manifest.files.get("step");
    const kept = await this.store.get(key);
    if (kept?.of === of && (await digestHex(kept.bytes)) === kept.sha256) return kept.bytes;
    const step = await this.transport.step(this.federation, ratio, MAX_GRAPH);
    if ((await digestHex(step.bytes)) !== step.sha256) throw new ProtocolError("the training step does not match its SHA-256; reload this page", "bad-payload/damaged");
    await this.store.put({ [key]: { ...step, of } });
    return step.bytes;
  }

  async values(manifest, which) {
    if (!manifest.files.has(which)) return new Map();
    const kept = await this.store.get(which);
    if (kept && hex(sha256(kept)) === manifest.files.get(which)) return unpackValues(manifest, which, kept);
    const file = await this.transport.values(this.federation, which, valuesSize(manifest, which));
    const tensors = unpackValues(manifest, which, file);
    await this.store.put({ [which]: file });
    return tensors;
  }

  /** Load the personal model and check its digest. */
  async loadState() {
    const { personal = null, owed = null } = (await this.read("model")) ?? {};
    this.personal = personal;
    this.owed = owed;
    this.best = (await this.read("best"))?.personal ?? null;
    this.asNew = new Map(this.manifest.of("personal").map(({ name }) => [name, this.engine.tensors.get(name).slice()]));
  }

  async read(key) {
    const kept = await this.store.get(key);
    if (kept && kept.sha256 !== digestOf(kept.tensors)) {
      throw new Error('the model in this browser is damaged; choose "Forget me" and take part again');
    }
    return kept?.tensors;
  }

  // --- identity ------------------------------------------------------------------------------------------------------

  /** Enrol under a name, or continue as the device of this browser. Throws Refused. */
  async join(name, budget) {
    this.budget = budget;
    const { train } = await this.data();
    await this.prior(this.info.settings, train)?.check(this.engine, train);
    while (!(await this.canRun(train))) await this.transport.rest(this.nextRest);
    // The first name may have been taken.
    if (!this.identity?.token && this.identity?.name !== name) {
      const key = hex(crypto.getRandomValues(new Uint8Array(32)));
      this.identity = { uid: this.info.uid, name, key, device: null, token: null, previous: null, budget };
      await this.keepIdentity({});
    }
    if (!this.identity.token) return this.enrol();
    this.transport.token = this.identity.token;
    await this.orEnrolAgain(() => this.say({
      budget, conditions: { available: true }, num_examples: train.count, holds_model: this.personal !== null,
    }));
    await this.keepIdentity({ budget });
  }

  /** Run the model once. Returns false if a download was damaged. Throws ProtocolError if this browser cannot run it. */
  async canRun(batches) {
    try {
      await this.engine.check(batches);
    } catch (error) {
      if (error.failure !== "bad-payload/damaged") throw error;
      this.tell({ failure: error.message, detail: this.again(error.message) });
      return false;
    }
    this.faults = 0;
    return true;
  }

  /** Return this device's class frequencies if the federation adjusts outputs by them; else null. */
  prior(settings, train) {
    return LabelPrior.of(this.manifest, settings, train.targets);
  }

  async enrol() {
    this.transport.token = this.enrolmentToken;
    const { train } = await this.data();
    const enrolled = await this.transport.enrol(this.federation, {
      name: this.identity.name, enrolment_key: this.identity.key, budget: this.budget,
      num_examples: train.count, profile: profile(),
    });
    await this.keepIdentity({ device: enrolled.device_id, token: enrolled.token, budget: this.budget });
    this.transport.token = enrolled.token;
    if (enrolled.notice) this.tell({ notice: enrolled.notice });
  }

  async keepIdentity(changes) {
    this.identity = { ...this.identity, ...changes };
    await this.store.put({ identity: this.identity });
  }

  async orEnrolAgain(call) {
    try {
      return await call();
    } catch (error) {
      if (!(error instanceof Refused && error.is("TokenExpired"))) throw error;
      await this.enrol();
      return call();
    }
  }

  async renewToken() {
    const token = await this.transport.newToken(this.identity.device, this.identity.key);
    await this.keepIdentity({ token, previous: this.identity.token });
    await this.settleToken();
  }

  /** Try the new token; keep the old one if it is refused. */
  async settleToken() {
    let { token } = this.identity;
    this.transport.token = token;
    try {
      await this.say({});
    } catch (error) {
      if (!(error instanceof Refused && error.is("NotAuthenticated"))) throw error;
      token = this.transport.token = this.identity.previous;
    }
    await this.keepIdentity({ token, previous: null });
  }

  async say(change) {
    if (this.identity?.device) await this.transport.changeDevice(this.identity.device, change);
  }

  /** Mark the device unavailable. reason: a reason of the contract, or a failure. */
  away(reason) {
    return this.say({ conditions: { available: false, reason } });
  }

  // --- steps ---------------------------------------------------------------------------------------------------------

  /**
   * Send a pending update, ask for work and do it. Returns "worked", "idle" (no work) or "over". After a fault of the
   * coordinator the device returns the work, waits and continues. Throws Stopped, and Refused if that is final.
   */
  async step() {
    try {
      const outcome = await this.once();
      this.faults = 0;
      return outcome;
    } catch (error) {
      const fault = (error instanceof Refused && !error.final) || error instanceof ProtocolError;
      if (!fault) throw error;
      await this.rest(error);
      return "idle";
    }
  }

  /** Return the message for a fault of the coordinator, and set the seconds to wait, `nextRest`. */
  again(fault) {
    this.nextRest = Math.min(FIRST_REST * 2 ** this.faults, LONGEST_REST);
    this.faults = Math.min(this.faults + 1, 30);
    return `${fault}; retrying in ${Math.round(this.nextRest)} s`;
  }

  async rest(fault) {
    this.tell({ phase: "waiting", failure: fault.message, detail: this.again(fault.message) });
    const working = this.working;
    this.working = null;
    if (working) await this.giveUp(working, failureOf(fault)).catch((error) => { if (error.final) throw error; });
    await this.transport.rest(this.nextRest);
  }

  async once() {
    const { pending } = this.progress;
    if (pending) await this.heard(pending, () => this.send(pending));
    let assignment = this.next;
    this.next = null;
    if (!assignment) {
      this.tell({ phase: "waiting", detail: this.trust.refused ?? "waiting for work", work: null });
      try {
        const answer = await this.orEnrolAgain(() => this.ask());
        assignment = answer.assignment;
        if (!assignment) await this.transport.rest(answer.pause);
      } catch (error) {
        if (error instanceof Refused && error.is("Finished")) return "over";
        throw error;
      }
    }
    if (this.transport.renewalDue) await this.renewToken();
    if (!assignment) return "idle";
    this.working = assignment;
    try {
      await this.takeNewVersion(assignment.manifest_digest);
      this.trust.check(assignment.settings);
      await this.heard({ id: assignment.assignment_id, silence: assignment.settings.silence_seconds },
        () => this.work(assignment));
    } catch (error) {
      await this.failed(assignment, error);
    }
    this.working = null;
    return "worked";
  }

  async ask() {
    const cost = this.progress.uploadCost;
    const answer = await this.transport.assignment(this.federation, WAIT_SECONDS, cost);
    if (cost) this.progress = { ...this.progress, uploadCost: null };
    return answer;
  }

  async failed(assignment, error) {
    // For these errors, the caller returns the work and waits.
    const rests = error instanceof BundleError || error instanceof BadPublication;
    if (error instanceof TrainingDiverged || (error instanceof ProtocolError && !rests)) {
      this.tell({ failure: error.message });
      await this.giveUp(assignment, failureOf(error));
    } else if (error instanceof Paused) {
      await this.giveUp(assignment, error.reason);
    } else if (error instanceof Refused && error.roundOver) {
      await this.say({ conditions: { available: true } });
    } else {
      throw error;
    }
  }

  /** Send heartbeats during some work. */
  async heard({ id, silence = 60 }, work) {
    const timer = setInterval(() => this.transport.heartbeat(id), (1000 * silence) / BEATS);
    try {
      return await work();
    } finally {
      clearInterval(timer);
    }
  }

  async takeNewVersion(digest) {
    if (!digest || digest === this.manifest.digest) return;
    const tensors = this.engine.read();
    await this.loadModel(await this.transport.federation(this.federation), digest);
    this.engine.load(tensors);
  }

  async giveUp(assignment, reason) {
    if (!this.personal) this.engine.load(this.asNew);
    await this.transport.handBack(assignment.assignment_id, reason);
  }

  async work(assignment) {
    const { kind } = assignment;
    const known = kind === "compare" ? this.method.mixesGlobal : kind !== "prepare" && this.method[kind];
    if (!known) {
      throw new ProtocolError(`pages do not support work of kind ${kind} for ${this.info.method}`, "unknown-work");
    }
    const job = await this.jobOf(assignment);
    if (kind === "evaluate") return this.evaluate(job);
    if (kind === "compare") return this.compare(job);
    return kind === "adapt" ? this.adapt(job) : this.train(job);
  }

  async jobOf(assignment) {
    const { kind, round, payload, settings } = assignment;
    const deadline = Date.now() + 1000 * assignment.deadline_seconds;
    this.tell({ phase: payload ? "downloading" : "waiting", detail: "downloading the model", work: { kind, round, step: 0, steps: 0, loss: null, deadline } });
    const data = await this.data();
    const trains = TRAINING.includes(kind);
    if (trains) this.trust.checkSteps(settings.local_steps ?? settings.local_epochs * data.train.length);
    const download = this.phase();
    const frequencies = this.prior(settings, data.train), prior = adjusts(assignment) ? frequencies : null;
    const labels = asksForLabels(assignment) ? frequencies?.sketch : null;
    let received = null;
    if (payload) {
      if (payload.bytes > largestPayload(this.manifest)) {
        throw new BundleError(`the payload has ${payload.bytes} bytes, more than this model can have`, "bad-payload/size");
      }
      received = decode(await this.transport.payload(assignment.assignment_id, payload), this.manifest);
      if (trains) await this.trust.checkFirstWeights(this.manifest, assignment, received);
      if (prior) received = { ...received, values: prior.moved(received.values, received.mask, 1) };
      this.received = !this.personal && isWhole(this.manifest, received) ? received.values : null;
    }
    const waits = kind !== "adapt";
    let paused = 0;
    return {
      assignment, settings, received, prior, labels, budget: this.budget, download: download.end(), manifest: this.manifest, engine: this.engine, data,
      state: { personal: this.personal, memory: this.progress.memory },
      seed: (purpose) => deriveSeed(`${this.federation}:${settings.seed}`, this.identity.name, round, purpose),
      progress: async (step, steps, loss) => {
        this.tell({ work: { kind, round, step, steps, loss, deadline } });
        paused += await this.checkpoint(waits ? (deadline - Date.now()) / 1000 - RESERVE_SECONDS : Infinity);
      },
      paused: () => paused,
    };
  }

  async train(job) {
    const { assignment } = job;
    const first = await this.judgeFirst(job);
    this.tell({ phase: "training", detail: `training in round ${assignment.round}` });
    const training = this.phase();
    const trained = await this.method[assignment.kind](job);
    const train = { ...training.end(), paused_seconds: job.paused() };
    const best = this.bestOf(job, trained);
    const { body, owed } = this.packed(job, trained, train);
    const { round } = assignment, { history } = this.progress;
    const accuracy = trained.validation?.accuracy ?? null;
    const judged = { ...this.progress.judged, ...first.judged };
    if (accuracy !== null) judged.now = trained.validation.num_examples;
    await this.keepAndSend(assignment, body, {
      ...first, judged, memory: trained.memory, rounds: this.progress.rounds + 1, lastRound: round,
      steps: this.progress.steps + trained.steps, stoppedRound: trained.stopped ? round : this.progress.stoppedRound,
      accuracyNow: accuracy ?? this.progress.accuracyNow,
      secondsTraining: this.progress.secondsTraining + train.seconds - train.paused_seconds,
      history: [...history, { round, accuracy, loss: trained.trainLoss }].slice(-MOST_HISTORY),
    }, { personal: trained.personal, best, owed });
  }

  /** Return an update's body, a bundle or JSON, and its rounding residual if it is rounded. */
  packed(job, trained, train) {
    const { mask, draw } = trained, { precision } = job.settings;
    const unadjusted = (values) => (job.prior ? job.prior.moved(values, mask, -1) : values);
    const values = trained.values && unadjusted(trained.values);
    const counts = { ...trained.counts }, rounds = values && precision === "int8";
    if (rounds) counts.carried_values = this.owed ? pack(this.manifest, this.owed, mask).filter(Boolean).length : 0;
    const report = JSON.stringify(reportOf(job, { ...trained, counts }, train));
    if (!values) return { body: report };
    if (!rounds) return { body: encode(this.manifest, values, mask, { draw, precision, report }) };
    const base = unadjusted(sentValues(this.manifest, job.received, mask));
    const rounded = roundUpdate(this.manifest, mask, values, base, this.owed, job.seed("quantise"));
    return { body: encode(this.manifest, rounded, mask, { draw, precision, report }), owed: rounded.owed };
  }

  /** Return the note of the best personal model after a round: the round's own, unless an older one validates better. */
  bestOf(job, trained) {
    if (!trained.personal || job.settings.personal_model === "last") return null;
    const newest = this.noteOf(job, trained.validation);
    return this.progress.best && givesWay(trained.validation, newest.lowest) ? null : newest;
  }

  /** Return the note of a personal model: round, validation result, and the lowest validation loss so far. */
  noteOf(job, validation) {
    return { round: job.assignment.round, validation, lowest: Math.min(validation.loss, this.progress.best?.lowest ?? Infinity) };
  }

  /** Return the accuracy of the first model received, before any local training; {} if it is known. */
  async judgeFirst(job) {
    if (this.progress.rounds || this.progress.accuracyBefore !== null) return {};
    const { manifest, received } = job;
    if (this.personal) this.engine.load(this.personal);
    if (received && isWhole(manifest, received)) this.engine.load(wholeModel(manifest, received));
    else if (received) mergeInPlace(manifest, this.engine.tensors, received.values, received.mask);
    const judged = await this.engine.evaluate(job.data.test ?? job.data.validation);
    return { accuracyBefore: judged.accuracy, judged: { ...this.progress.judged, before: judged.num_examples } };
  }

  async evaluate(job) {
    this.tell({ phase: "evaluating", detail: `evaluating the model in round ${job.assignment.round}` });
    const measuring = this.phase();
    const finishing = await this.mixWithGlobal(job);
    const judged = await this.method.evaluate({ ...job, state: { ...job.state, personal: this.best ?? this.personal } });
    judged.flops = (judged.flops ?? 0) + finishing;
    const taken = this.progress.best?.taken ? { taken: this.progress.best.taken } : {};
    const flops = nonzeroFlops(this.manifest, this.bestTensors());
    const receipt = { ...receiptOf(job, judged, measuring.end()), ...taken, inference_flops: flops };
    const own = judged.personal ?? judged.globalModel, shared = judged.globalModel;
    await this.keepAndSend(job.assignment, JSON.stringify(receipt), {
      accuracyNow: own?.accuracy ?? this.progress.accuracyNow,
      accuracyGlobal: shared?.accuracy ?? this.progress.accuracyGlobal,
      judged: {
        ...this.progress.judged, ...(own ? { now: own.num_examples } : {}), ...(shared ? { global: shared.num_examples } : {}),
      },
    });
  }

  async adapt(job) {
    const first = await this.judgeFirst(job);
    this.tell({ phase: "training", detail: "adapting the finished model" });
    const training = this.phase();
    const personal = await this.method.adapt(job);
    const train = { ...training.end(), paused_seconds: job.paused() };
    this.engine.load(personal);
    const validation = await this.engine.evaluate(job.data.validation);
    const heldOut = job.data.test ? await this.engine.evaluate(job.data.test) : validation;
    const receipt = { personal: heldOut, telemetry: { download: job.download, train } };
    const best = job.settings.personal_model !== "last" ? this.noteOf(job, validation) : null;
    await this.keepAndSend(job.assignment, JSON.stringify(receipt), {
      ...first, judged: { ...this.progress.judged, ...first.judged, now: heldOut.num_examples }, adapted: true,
      accuracyNow: heldOut.accuracy, secondsTraining: this.progress.secondsTraining + train.seconds,
    }, { personal, best });
  }

  /**
   * Keep a mixture of the personal and the finished global model if its validation loss is lower than the best model's.
   * With `finetune_epochs` one mixture is also trained within the budget. Returns the FLOPs of that.
   */
  async mixWithGlobal(job) {
    const own = this.personal;
    if (!job.assignment.plan?.finished || !this.method.mixesGlobal || !job.received || !own || !this.progress.best) return 0;
    if (job.settings.personal_model === "fleet") return this.takeByEvidence(job);
    const received = wholeModel(this.manifest, job.received);
    for (const share of GLOBAL_SHARES) await this.keepIfBetter(job, mixed(own, received, share), share);
    if (!this.method.finish || !job.settings.finetune_epochs) return 0;
    try {
      const { tensors, flops } = await this.method.finish(job, mixed(own, received, SHARE));
      await this.keepIfBetter(job, tensors, SHARE);
      return flops;
    } catch (error) {
      if (!(error instanceof TrainingDiverged)) throw error;
      return 0;
    }
  }

  /** Report the gains of other models over the finished one on validation data. */
  async compare(job) {
    this.tell({ phase: "evaluating", detail: "comparing the finished model with others" });
    const measuring = this.phase();
    const { models, flops } = await candidatesOf(job, this.method);
    const evidence = await evidenceOf(this.engine, models, job.data.validation);
    const telemetry = { download: job.download, train: measuring.end() };
    const receipt = { finetune_flops: flops, telemetry, ...(evidence ? { evidence } : {}) };
    await this.keepAndSend(job.assignment, JSON.stringify(receipt), {});
  }

  /** Keep the candidate that is best by all devices' evidence as the best model; returns the FLOPs of the candidates. */
  async takeByEvidence(job) {
    const { models, flops } = await candidatesOf(job, this.method);
    const evidence = await evidenceOf(this.engine, models, job.data.validation);
    const taken = choice(poolOf(job.assignment.plan), evidence, models);
    this.engine.load(models.get(taken));
    const validation = await this.engine.evaluate(job.data.validation).catch(() => null);
    if (!validation) return flops;
    this.best = models.get(taken);
    this.progress = { ...this.progress, best: { ...this.noteOf(job, validation), share: SHARES[taken] ?? 0, taken } };
    await this.store.put({ best: sealed({ personal: this.best }), progress: this.progress });
    return flops;
  }

  /** Keep a model as the best one if its validation loss is the lowest. share: of the global model in it. */
  async keepIfBetter(job, tensors, share) {
    this.engine.load(tensors);
    const validation = await this.engine.evaluate(job.data.validation).catch(() => null);
    if (!validation || validation.loss >= this.progress.best.validation.loss) return;
    this.best = tensors;
    this.progress = { ...this.progress, best: { ...this.noteOf(job, validation), share } };
    await this.store.put({ best: sealed({ personal: tensors }), progress: this.progress });
  }

  /** Keep the new state and the update together, then send it. */
  async keepAndSend(assignment, body, changes, { personal, best, owed } = {}) {
    const text = typeof body === "string";
    const bytes = text ? utf8(body) : body;
    const pending = { id: assignment.assignment_id, kind: assignment.kind, text, sha256: await digestHex(bytes), silence: assignment.settings.silence_seconds };
    this.progress = { ...this.progress, ...changes, ...(best ? { best } : {}), pending, everything: this.moved() };
    const entries = { progress: this.progress, outbox: bytes };
    if (personal) {
      this.personal = personal;
      if (best) {
        this.best = personal;
        entries.best = sealed({ personal });
      }
    }
    if (owed) {
      entries.before = this.owed && sealed({ owed: this.owed });
      this.owed = owed;
    }
    if (personal || owed) entries.model = sealed({ personal: this.personal, owed: this.owed });
    await this.store.put(entries);
    await this.send(pending);
  }

  async send(pending) {
    const body = await this.store.get("outbox");
    if (!body || (await digestHex(body)) !== pending.sha256) throw new Error('the update in this browser is damaged; choose "Forget me" and take part again');
    this.tell({ phase: "uploading", detail: "sending the update" });
    const upload = this.phase();
    try {
      this.next = await this.transport.update(pending.id, body, pending.text, this.progress.uploadCost);
    } catch (error) {
      if (!(error instanceof Refused) || (error.final && !error.roundOver) || error.is("TokenExpired")) throw error;
      await this.notCounted(pending, error);
      return;
    }
    const cost = { assignment_id: pending.id, upload: upload.end(), everything: this.moved() };
    await this.keepProgress({ pending: null, uploadCost: cost }, { outbox: undefined, before: undefined });
  }

  /** Keep the local step of an update that was not accepted; restore its rounding residual. */
  async notCounted(pending, error) {
    const before = await this.read("before");
    const entries = { outbox: undefined, before: undefined };
    if (before) {
      this.owed = before.owed;
      entries.model = sealed({ personal: this.personal, owed: this.owed });
    }
    await this.keepProgress({ pending: null }, entries);
    if (!error.roundOver) {
      this.tell({ failure: error.message });
      await this.transport.handBack(pending.id, "update-refused");
    }
    const holds = TRAINING.includes(pending.kind) && this.personal !== null;
    await this.say({ conditions: { available: true }, ...(holds ? { holds_model: true } : {}) });
  }

  async keepProgress(changes, entries = {}) {
    this.progress = { ...this.progress, ...changes, everything: this.moved() };
    await this.store.put({ ...entries, progress: this.progress });
  }

  // --- the model -----------------------------------------------------------------------------------------------------

  /** Return the tensors to predict with: the best personal model, else the last global one; or null. */
  bestTensors() {
    const own = this.best ?? this.personal;
    if (own || !this.received) return own;
    const tensors = this.engine.read();
    mergeInPlace(this.manifest, tensors, this.received, null);
    return tensors;
  }

  /**
   * Return the model's output for one sample, Float32Array, also during training. sample: raw if the federation has a
   * preparation; an array of one if samples may have different sizes. Throws Error without a model.
   */
  async predict(sample) {
    const tensors = this.bestTensors();
    if (!tensors) throw new Error("there is no model yet; take part in a round first");
    const input = this.manifest.preparation ? await this.engine.prepare({ inputs: sample, count: 1 }) : sample;
    return this.engine.predict(input, tensors);
  }

  /** Return the bytes of all HTTP bodies so far. */
  moved() {
    const { down, up, frozen } = this.transport.traffic;
    const { bytes_down, bytes_up, frozen_down } = this.movedBefore;
    return { bytes_down: bytes_down + down, bytes_up: bytes_up + up, frozen_down: frozen_down + frozen };
  }

  /** Measure a phase; `end()` returns its cost in the contract's form. */
  phase() {
    const begin = performance.now(), before = { ...this.transport.traffic };
    return {
      end: () => ({
        seconds: (performance.now() - begin) / 1000,
        bytes_down: this.transport.traffic.down - before.down,
        bytes_up: this.transport.traffic.up - before.up,
        ...NO_ENERGY,
      }),
    };
  }
}

function decoded(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new ProtocolError("the manifest is not UTF-8 text");
  }
}

function sealed(tensors) {
  return { tensors, sha256: digestOf(tensors) };
}

function digestOf(tensors) {
  const hasher = new Sha256();
  for (const part of Object.values(tensors)) {
    for (const [name, { buffer, byteOffset, byteLength }] of part ?? []) {
      hasher.update(utf8(name));
      hasher.update(new Uint8Array(buffer, byteOffset, byteLength));
    }
  }
  return hex(hasher.digest());
}

/** Derive a seed below 2^63, BigInt, from `parts`, as the SDK does. */
export function deriveSeed(...parts) {
  return BigInt(`0x${hex(sha256(utf8(pythonJson(parts.map(String)))).subarray(0, 8))}`) >> 1n;
}

const bounded = (loss) => Math.max(-LARGEST_SCORE, Math.min(LARGEST_SCORE, loss));

function reportOf(job, trained, train) {
  return {
    num_examples: trained.numExamples, status: trained.stopped ? "stopped" : "active", steps: trained.steps,
    training_flops: trained.flops, train_loss: bounded(trained.trainLoss),
    ...(trained.validation ? { validation_loss: trained.validation.loss } : {}),
    ...(trained.stopLoss === null ? {} : { stop_loss: bounded(trained.stopLoss) }),
    counts: trained.counts, received: job.received?.parts ?? {}, telemetry: { download: job.download, train },
    ...(job.labels ? { labels: job.labels } : {}),
  };
}

function receiptOf(job, judged, train) {
  const found = [judged.personal, judged.globalModel, judged.validation].filter(Boolean);
  const receipt = {
    others: judged.others ?? {}, finetune_flops: judged.flops ?? 0, telemetry: { download: job.download, train },
  };
  if (judged.personal) receipt.personal = judged.personal;
  if (judged.globalModel) receipt.global_model = judged.globalModel;
  if (judged.validation) receipt.validation = judged.validation;
  return found.length ? receipt : {};
}

function profile() {
  const system = navigator.userAgent.replace(/^Mozilla\/5\.0 \(([^)]*)\).*$/, "$1").slice(0, 200);
  const memory = navigator.deviceMemory ? { memory_bytes: navigator.deviceMemory * 2 ** 30 } : {};
  const cores = Math.min(Math.max(1, navigator.hardwareConcurrency || 1), 4096);
  return { board: `browser, ${threads} thread${threads > 1 ? "s" : ""}`, system, cores, ...memory, sdk_version: "page" };
}
