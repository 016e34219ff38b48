/**
 * The device half of the methods that a page takes part in: `edge_sdk/methods`, where their papers are named. A method is
 * a record of functions of a job { assignment, settings, manifest, engine, data, state, received, seed(purpose),
 * progress, budget }: `train` and `personalise` return the state and the update, `evaluate` the results, `adapt` the
 * personal model.
 */
import { judgeRound } from "./stopping.js";
import { BundleError, ProtocolError, TrainingDiverged } from "./errors.js";
import { trainingFlops } from "./flops.js";
import { FULL_RATIO, drawNeurons, mergeInPlace, pack, sameMask } from "./masks.js";
import { hex, sha256, utf8 } from "./sha256.js";

/** Return a whole payload as tensors by name. Throws BundleError for one that is partial or missing. */
export function wholeModel(manifest, received) {
  if (!received) throw new BundleError("the assignment has no payload");
  if (!isWhole(manifest, received)) throw new BundleError("the payload has only a part of the model, and there is no model to merge it into");
  const tensors = new Map();
  let begin = 0;
  for (const spec of manifest.shared) {
    tensors.set(spec.name, received.values.slice(begin, begin + spec.size));
    begin += spec.size;
  }
  return tensors;
}

/** Return whether a payload has all shared values. */
export const isWhole = (manifest, received) => received.values.length === manifest.sharedValues;

/** Return the received values under a mask, packed: the base of an update. */
export function sentValues(manifest, received, mask) {
  if (received && sameMask(received.mask, mask)) return received.values;
  return pack(manifest, wholeModel(manifest, received), mask);
}

/** Return the mixture personal + share * (received - personal); tensors that were not received stay. */
export function mixed(personal, received, share) {
  return new Map([...personal].map(([name, own]) => {
    const shared = received.get(name);
    return [name, shared ? own.map((value, i) => value + Math.fround(share * Math.fround(shared[i] - value))) : own];
  }));
}

/** Shares of the global model in the mixtures to try; the first of equally good ones is kept. */
export const GLOBAL_SHARES = [0.25, 0.5, 0.75, 1];

const learningRate = ({ settings, assignment }) =>
  settings.learning_rate * settings.learning_rate_decay ** Math.max(0, assignment.round - 1);

function trainLoaded(job, options = {}, purpose = "train") {
  const rate = learningRate(job);
  const given = { learningRate: rate, seed: job.seed(purpose), progress: job.progress, ...options };
  return job.engine.train(job.data.train, job.settings, given);
}

function fineTune(job, options = {}, purpose = "adapt") {
  const { finetune_epochs: epochs, finetune_learning_rate: rate } = job.settings;
  const settings = {
    ...job.settings,
    ...(epochs ? { local_epochs: epochs, local_steps: null } : {}),
    ...(rate ? { learning_rate: rate, learning_rate_decay: 1 } : {}),
  };
  return trainLoaded({ ...job, settings }, options, purpose);
}

/** Return the outcome of a round after training, with the stop rule's decision on the engine's model. */
async function conclude(job, result, { personal, values = null, mask = null, draw = null, counts = {} }) {
  const validate = personal !== null && job.settings.personal_model !== "last";
  const judged = await judgeRound(
    () => job.engine.evaluate(job.data.validation), job.settings, job.state.memory, result.trainLoss, validate);
  return {
    ...result, ...judged, personal, values, mask, draw, counts,
    flops: trainingFlops(job.manifest, result.samples, values && mask),
  };
}

async function judgeHeldOut(job) {
  const validation = await job.engine.evaluate(job.data.validation);
  return [job.data.test ? await job.engine.evaluate(job.data.test) : validation, validation];
}

/**
 * Return a fine-tuned copy, the model `start` or one of their mixtures: the one with the lowest loss on validation data,
 * which are not trained on. With `personal_model=last` always the copy. Throws TrainingDiverged if the copy's loss is not
 * finite.
 */
async function chooseCopy(job, copy, start) {
  if (job.settings.personal_model === "last") return copy;
  job.engine.load(copy);
  let best = copy, least = (await job.engine.evaluate(job.data.validation)).loss;
  const floats = new Map([...start].filter(([, values]) => values instanceof Float32Array));
  for (const share of GLOBAL_SHARES) {
    const candidate = share === 1 ? start : mixed(copy, floats, share);
    job.engine.load(candidate);
    const validation = await job.engine.evaluate(job.data.validation).catch((error) => {
      if (!(error instanceof TrainingDiverged)) throw error;
      return null;
    });
    if (validation && validation.loss < least) [best, least] = [candidate, validation.loss];
  }
  return best;
}

/** Evaluate the choice of `chooseCopy`; `others` has the copy if another model was chosen. */
async function judgeChoiceOfCopy(job, copy, start) {
  const chosen = await chooseCopy(job, copy, start), others = {};
  if (chosen !== copy) {
    job.engine.load(copy);
    others.copy = await job.engine.evaluate(job.data.test ?? job.data.validation);
  }
  job.engine.load(chosen);
  const [personal, validation] = await judgeHeldOut(job);
  return { personal, validation, others };
}

async function evaluateBoth(job) {
  let personal = null, validation = null, globalModel = null;
  if (job.state.personal) {
    job.engine.load(job.state.personal);
    [personal, validation] = await judgeHeldOut(job);
  }
  if (job.received) {
    job.engine.load(wholeModel(job.manifest, job.received));
    const [judged, first] = await judgeHeldOut(job);
    globalModel = judged;
    validation ??= first;
  }
  return { personal, globalModel, validation };
}

async function adaptAsInARound(job, { mask = null, ratio } = {}) {
  job.engine.load(wholeModel(job.manifest, job.received));
  const start = job.engine.read();
  await fineTune(job, { mask, ratio });
  return chooseCopy(job, job.engine.read(), start);
}

async function trainWhole(job, pull = 0) {
  job.engine.load(wholeModel(job.manifest, job.received));
  const result = await trainLoaded(job, { pull });
  const counts = pull ? { pulled_steps: result.steps } : {};
  return conclude(job, result, { personal: null, values: pack(job.manifest, job.engine.tensors, null), counts });
}

async function evaluateGlobal(job) {
  job.engine.load(wholeModel(job.manifest, job.received));
  const [globalModel, validation] = await judgeHeldOut(job);
  if (!job.settings.finetune_epochs) return { personal: null, globalModel, validation };
  const whole = job.engine.read();
  const { samples } = await fineTune(job, {}, "finetune");
  const judged = await judgeChoiceOfCopy(job, job.engine.read(), whole);
  return { ...judged, globalModel, flops: trainingFlops(job.manifest, samples, null) };
}

async function adaptGlobal(job) {
  job.engine.load(wholeModel(job.manifest, job.received));
  const whole = job.engine.read();
  if (!job.settings.finetune_epochs) return whole;
  await fineTune(job, {}, "finetune");
  return chooseCopy(job, job.engine.read(), whole);
}

const fedavg = { train: (job) => trainWhole(job), evaluate: evaluateGlobal, adapt: adaptGlobal };

const fedprox = {
  ...fedavg,
  train: (job) => trainWhole(job, own(job, "proximal_weight")),
};

function own(job, name) {
  const value = job.settings.method_settings[name];
  if (typeof value !== "number") throw new ProtocolError(`method_settings.${name} is missing; reload this page`);
  return value;
}

function assigned(job) {
  const draw = job.assignment.work ?? null;
  return { draw, mask: draw && drawNeurons(job.manifest, draw), ratio: draw?.ratio };
}

const fedspu = {
  async train(job) {
    const { draw, mask, ratio } = assigned(job);
    job.engine.load(startingPoint(job, mask));
    const result = await trainLoaded(job, { mask, ratio });
    const personal = job.engine.read();
    const values = pack(job.manifest, personal, mask);
    return conclude(job, result, { personal, values, mask, draw, counts: frozen(job, mask, values) });
  },
  evaluate: evaluateBoth,
  adapt: (job) => adaptAsInARound(job, assigned(job)),
  mixesGlobal: true,
  /** Train a model once more, at the device's budget; return it and the FLOPs. Throws TrainingDiverged. */
  async finish(job, tensors) {
    const ratio = job.budget, whole = ratio >= FULL_RATIO;
    const key = hex(sha256(utf8(String(job.seed("finish"))))).slice(0, 32);
    const mask = whole ? null : drawNeurons(job.manifest, { key, ratio });
    job.engine.load(tensors);
    const { samples } = await fineTune(job, { mask, ratio }, "finish");
    return { tensors: job.engine.read(), flops: trainingFlops(job.manifest, samples, mask) };
  },
};

/** Return the personal model with the received active values; in the first round, the received model. */
function startingPoint(job, mask) {
  const { manifest, received, state } = job;
  if (!state.personal) return wholeModel(manifest, received);
  if (received && !isWhole(manifest, received) && !sameMask(received.mask, mask)) {
    throw new BundleError("the payload's mask differs from the assignment's");
  }
  const merged = new Map([...state.personal].map(([name, values]) => [name, values.slice()]));
  mergeInPlace(manifest, merged, sentValues(manifest, received, mask), mask);
  return merged;
}

function frozen(job, mask, values) {
  if (!mask) return {};
  const neurons = [...job.manifest.groups].reduce((all, [group, size]) => all + size - mask.get(group).length, 0);
  return { frozen_neurons: neurons, frozen_values: job.manifest.sharedValues - values.length };
}

const joined = (job) => new Map([...(job.state.personal ?? []), ...wholeModel(job.manifest, job.received)]);

const fedper = {
  async train(job) {
    job.engine.load(joined(job));
    const result = await trainLoaded(job);
    const personal = job.engine.read();
    const own = job.manifest.kept.filter((spec) => spec.trainable && spec.policy === "personal");
    const counts = { private_values: own.reduce((all, spec) => all + spec.size, 0) };
    return conclude(job, result, { personal, values: pack(job.manifest, personal, null), counts });
  },
  async evaluate(job) {
    const untuned = await evaluateBoth(job);
    if (!job.settings.finetune_epochs || !job.state.personal) return untuned;
    job.engine.load(job.state.personal);
    const { samples } = await fineTune(job, {}, "finetune");
    const judged = await judgeChoiceOfCopy(job, job.engine.read(), job.state.personal);
    const others = { untuned: untuned.personal, ...judged.others };
    return { ...judged, globalModel: null, others, flops: trainingFlops(job.manifest, samples, null) };
  },
  async adapt(job) {
    job.engine.load(joined(job));
    const only = new Set(job.manifest.tensors.filter((spec) => spec.policy !== "shared").map((spec) => spec.name));
    await fineTune(job, { only });
    return job.engine.read();
  },
};

const local = {
  async personalise(job) {
    job.engine.load(job.state.personal ?? wholeModel(job.manifest, job.received));
    const result = await trainLoaded(job);
    return conclude(job, result, { personal: job.engine.read() });
  },
  evaluate: evaluateBoth,
  adapt: (job) => adaptAsInARound(job),
};

/**
 * Method -> its functions. `mixesGlobal`: a mixture of the personal and the finished global model may be kept; `finish`:
 * trains one once more, at the end.
 */
export const METHODS = { fedavg, fedprox, fedper, fedspu, local };
