/** The choice of a model by the evidence of all devices: `sparrow/protocol/evidence.py`, where the paper is named. */
import { TrainingDiverged } from "./errors.js";
import { mixed, wholeModel } from "./methods.js";
import { sum } from "./manifest.js";

export const GLOBAL = "global";
export const CANDIDATES = ["personal", "mixture", "finished", "alone"];
/** Share of the global model in a mixture, and of each candidate that began with some of it. */
export const SHARE = 0.5;
export const SHARES = { [GLOBAL]: 1, mixture: SHARE, finished: SHARE };
const LARGEST_GAIN = 1, MOST_PARTS = 64, FEWEST_DEVICES = 3, DEPARTS = 0.5, AHEAD = 2, TINY = 1e-9, LARGEST_TOLD = 1e6;

const indices = CANDIDATES.map((_, i) => i);
const pairs = indices.flatMap((row) => indices.slice(row).map((column) => [row, column]));
const square = (upper) => {
  const matrix = indices.map(() => indices.map(() => 0));
  pairs.forEach(([row, column], i) => { matrix[row][column] = matrix[column][row] = upper[i]; });
  return matrix;
};

/** Return the candidates, { models: Map name -> tensors, flops }, from the whole model received and the personal one. */
export async function candidatesOf(job, method) {
  const received = wholeModel(job.manifest, job.received);
  const own = job.state.personal ?? job.engine.read();
  const shared = new Map([...own, ...received]), personal = job.state.personal ?? shared;
  const mixture = mixed(personal, received, SHARE);
  const models = new Map([[GLOBAL, shared], ["personal", personal], ["mixture", mixture]]);
  if (!method.finish || !job.settings.finetune_epochs) return { models, flops: 0 };
  try {
    const { tensors, flops } = await method.finish(job, mixture);
    models.set("finished", tensors);
    return { models, flops };
  } catch (error) {
    if (!(error instanceof TrainingDiverged)) throw error;
    return { models, flops: 0 };
  }
}

/** Return the gains of `models` over the global one on validation data; null if they cannot be compared. */
export async function evidenceOf(engine, models, validation) {
  const each = Math.ceil(validation.count / MOST_PARTS);
  const parts = [...validation].flatMap((batch) => partsOf(batch, each));
  const losses = async (tensors) => {
    engine.load(tensors);
    try {
      const found = [];
      for (const part of parts) found.push((await engine.evaluate([part])).loss);
      return found;
    } catch (error) {
      if (!(error instanceof TrainingDiverged)) throw error;
      return null;
    }
  };
  const shared = await losses(models.get(GLOBAL));
  if (!shared || parts.length < 2) return null;
  const gains = [];
  for (const name of CANDIDATES) {
    const found = models.has(name) ? await losses(models.get(name)) : shared;
    gains.push(shared.map((loss, i) => (found ? clipped(loss - found[i]) : -LARGEST_GAIN)));
  }
  return momentsOf(gains);
}

const clipped = (gain) => Math.max(-LARGEST_GAIN, Math.min(LARGEST_GAIN, gain));

/** Return the evidence of gains, an array for each candidate: means, and covariances between parts. */
export function momentsOf(gains) {
  const parts = gains[0].length, means = gains.map((each) => sum(each) / parts);
  const within = pairs.map(([row, column]) =>
    sum(gains[row].map((gain, i) => (gain - means[row]) * (gains[column][i] - means[column]))) / (parts - 1));
  return { parts, gains: means, within };
}

function partsOf(batch, each) {
  const width = batch.inputs.length / batch.count, wide = batch.targets.length / batch.count, parts = [];
  for (let begin = 0; begin < batch.count; begin += each) {
    const end = Math.min(batch.count, begin + each);
    const inputs = batch.inputs.slice(begin * width, end * width);
    parts.push({ ...batch, inputs, targets: batch.targets.slice(begin * wide, end * wide), count: end - begin });
  }
  return parts;
}

/** Return the pool in a plan, { devices, inverseParts, mean, between, within }; null if it has none. */
export function poolOf(plan) {
  const named = (kind, names) => names.map((name) => plan?.[`pool ${kind} ${name}`]);
  const both = pairs.map(([row, column]) => `${CANDIDATES[row]} ${CANDIDATES[column]}`);
  const mean = named("gain", CANDIDATES), between = named("between", both), within = named("within", both);
  const devices = plan?.["pool devices"], inverseParts = plan?.["pool inverse_parts"];
  if (!(devices >= FEWEST_DEVICES && inverseParts >= 0)) return null;
  const sound = [devices, inverseParts, ...mean, ...between, ...within].every((value) => typeof value === "number" && Math.abs(value) <= LARGEST_TOLD);
  return sound ? { devices, inverseParts, mean, between: square(between), within: square(within) } : null;
}

/** Return the name of the best candidate in `there`, a Map, or GLOBAL. */
export function choice(pool, evidence, there) {
  if (!pool && !evidence) return GLOBAL;
  if (!pool) return largest(cautious(evidence), there, 0);
  const usual = [GLOBAL, ...CANDIDATES].indexOf(largest(pool.mean, there, 0));
  if (!evidence) return [GLOBAL, ...CANDIDATES][usual];
  const { expected, covariance } = expectedOf(pool, evidence);
  const [own, at] = [[0, ...expected], (i, j) => (i && j ? covariance[i - 1][j - 1] : 0)];
  const apart = own.map((_, i) => Math.sqrt(Math.max(0, at(i, i) + at(usual, usual) - 2 * at(i, usual))));
  const [shared, ...gains] = own.map((gain, i) => gain - DEPARTS * apart[i] + (i === usual ? TINY : 0));
  return largest(gains, there, shared - TINY);
}

/** Return the candidate with the largest gain, or GLOBAL if none exceeds `least`. */
function largest(gains, there, least) {
  let best = GLOBAL, most = least + TINY;
  CANDIDATES.forEach((name, i) => {
    if (there.has(name) && gains[i] > most) [best, most] = [name, gains[i]];
  });
  return best;
}

/** Return each candidate's expected gain on new samples: the fleet's mean, updated by the page's own evidence. */
function expectedOf({ devices, inverseParts, mean, between, within }, evidence) {
  const noisy = indices.map((i) => indices.map((j) => between[i][j] + within[i][j] / evidence.parts + (i === j ? TINY : 0)));
  const told = indices.map((i) => solved(noisy, between[i]));
  const expected = mean.map((value, i) => value + sum(told[i].map((share, j) => share * (evidence.gains[j] - mean[j]))));
  const others = indices.map((i) => indices.map((j) => (i === j) - told[i][j]));
  const ofMean = indices.map((i) => indices.map((j) => (between[i][j] + inverseParts * within[i][j]) / devices));
  const covariance = indices.map((i) => indices.map((j) =>
    between[i][j] - sum(told[i].map((share, k) => share * between[k][j]))
    + sum(others[i].map((share, k) => share * sum(others[j].map((other, l) => ofMean[k][l] * other))))));
  return { expected, covariance };
}

function cautious({ parts, gains, within }) {
  const variances = square(within);
  return gains.map((gain, i) => gain - AHEAD * Math.sqrt(Math.max(0, variances[i][i]) / parts));
}

/** Solve matrix x = right by Gaussian elimination with pivots. */
function solved(matrix, right) {
  const rows = matrix.map((row, i) => [...row, right[i]]), count = rows.length;
  for (let at = 0; at < count; at++) {
    let pivot = at;
    for (let i = at + 1; i < count; i++) if (Math.abs(rows[i][at]) > Math.abs(rows[pivot][at])) pivot = i;
    [rows[at], rows[pivot]] = [rows[pivot], rows[at]];
    for (let i = 0; i < count; i++) {
      if (i === at) continue;
      const factor = rows[i][at] / rows[at][at];
      for (let j = at; j <= count; j++) rows[i][j] -= factor * rows[at][j];
    }
  }
  return rows.map((row, i) => row[count] / row[i]);
}
