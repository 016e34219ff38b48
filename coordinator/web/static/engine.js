/**
 * Train and evaluate a model with onnxruntime-web: `edge_sdk/engines` with the training step that the federation publishes
 * as an ONNX graph. Tensors are Maps of a name to a typed array.
 */
import { ProtocolError, TrainingDiverged } from "./errors.js";
import { product, zeros } from "./manifest.js";
import { activeAxes, placesOf } from "./masks.js";
import { Optimiser } from "./optimiser.js";
import { Generator } from "./pcg64.js";
import { decoded } from "./raw.js";
import { passes } from "./samples.js";

const PACKAGE = "onnxruntime-web-1.30.0"; // the version that runtime.py pins
const RUNTIME = new URL(`./runtime/${PACKAGE}/`, import.meta.url).href;
const CODE = `${RUNTIME}ort.wasm.bundle.min.mjs`, WASM = `${RUNTIME}ort-wasm-simd-threaded.wasm`;
const MOST_THREADS = 4;
const PREPARED_SAMPLES = 256, PREPARED_VALUES = 2 ** 22; // at once
const { fround } = Math;

/** Threads of one step: more than one only if the page is isolated from other origins. */
export const threads = self.crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency || 1) : 1;

let ort = null;

/** Return onnxruntime-web, loaded on first use. Throws Error if the coordinator does not have it. */
async function runtime() {
  ort ??= await import(CODE).catch(() => {
    throw new Error("onnxruntime-web does not load: reload this page, or ask the operator to run sparrow web");
  });
  Object.assign(ort.env.wasm, { wasmPaths: { wasm: WASM }, numThreads: threads });
  ort.env.logLevel = "error";
  return ort;
}

/** Keep the loaded runtime for visits without a network. Browsers have `caches` only on pages that came over HTTPS. */
async function keepRuntime() {
  const cache = await self.caches?.open(`sparrow ${PACKAGE}`);
  if (cache && !(await cache.match(WASM, { ignoreVary: true }))) await cache.addAll([CODE, WASM]);
}

/** A model of the federation, with its training and evaluation. */
export class Engine {
  /**
   * graphs: { step(ratio), evaluation(), preparation() }, functions that return ONNX files, Uint8Array. frozen: the tensors
   * that are not trained. own: initial values of tensors that stay on the device.
   */
  constructor(manifest, graphs, frozen, own) {
    this.manifest = manifest;
    this.graphs = graphs;
    this.frozen = frozen;
    this.tensors = new Map(manifest.kept.map((spec) => [spec.name, zeros(spec)]));
    this.dims = new Map(manifest.tensors.map((spec) => [spec.name, spec.shape]));
    this.sessions = new Map();
    this.turn = Promise.resolve();
    this.load(own);
  }

  /** Copy tensors into the model; others stay. */
  load(tensors) {
    for (const [name, values] of tensors) this.tensors.get(name).set(values);
  }

  /** Return copies of all tensors. */
  read() {
    return new Map([...this.tensors].map(([name, values]) => [name, values.slice()]));
  }

  /**
   * Train a part of the model on `batches` as the federation's settings say.
   *
   * mask: active neurons, a share `ratio` of each group, null for all; only: names of the trained tensors, null for all; pull: weight of the proximal
   * term (FedProx), 0 for none. seed: BigInt, decides shuffling and dropout. progress(done, total,
   * loss) is awaited after each step. Returns { numExamples, samples, steps, trainLoss }. Throws TrainingDiverged.
   */
  async train(batches, settings, { mask = null, ratio = 1, only = null, pull = 0, learningRate, seed, progress }) {
    const total = settings.local_steps ?? settings.local_epochs * batches.length;
    const leaves = this.leaves(mask, only);
    const share = mask ? ratio : 1;
    const session = await this.session(`step ${share}`, () => this.graphs.step(share));
    const optimiser = new Optimiser(settings, learningRate, new Map([...leaves].map(([name, leaf]) => [name, leaf.values])));
    const start = pull ? new Map([...leaves].map(([name, leaf]) => [name, leaf.values.slice()])) : null;
    const chance = Generator.of([seed, 1n]);
    const wanted = session.outputNames.filter((name) => name === "loss" || /^(grad|new):/.test(name));
    const places = this.activePlaces(session, mask);
    let done = 0, samples = 0, lossSum = 0;
    for (const batch of passes(batches, seed)) {
      const drawn = noise(session, chance, batch.count);
      const answer = await this.run(session, batch, { ...places, ...drawn }, wanted);
      const loss = answer.loss.data[0];
      for (const name of wanted) if (name.startsWith("new:")) this.tensors.get(name.slice(4)).set(answer[name].data);
      done += 1;
      if (!Number.isFinite(loss)) throw diverged(batch, loss, done, total, learningRate);
      optimiser.step(gradientsOf(leaves, answer, pull, start));
      for (const leaf of leaves.values()) leaf.writeBack();
      samples += batch.count;
      lossSum += loss * batch.count;
      await progress(done, total, lossSum / samples);
      if (done === total) break;
    }
    for (const [name, values] of this.tensors) {
      if (values instanceof Float32Array && !values.every(Number.isFinite)) {
        const met = `${name} is not finite after ${total} steps; lower the learning rate or set a clip`;
        throw new TrainingDiverged(met, "training-diverged/weights");
      }
    }
    return { numExamples: batches.count, samples, steps: total, trainLoss: lossSum / samples };
  }

  /** Return { num_examples, loss, accuracy } of the model on `batches`. Throws TrainingDiverged. */
  async evaluate(batches) {
    let seen = 0, lossSum = 0, correct = 0;
    for (const batch of batches) {
      const { loss, output } = await this.answer(batch);
      const classes = product(this.manifest.outputShape);
      seen += batch.count;
      lossSum += loss.data[0] * batch.count;
      for (let i = 0; i < batch.count; i++) {
        correct += Number(best(output.data.subarray(i * classes, (i + 1) * classes)) === Number(batch.targets[i]));
      }
    }
    if (!Number.isFinite(lossSum)) {
      throw new TrainingDiverged("the loss on held-out data is not finite", "training-diverged/held-out");
    }
    return { num_examples: seen, loss: fround(lossSum / seen), accuracy: correct / seen };
  }

  /**
   * Return the model's inputs for raw samples, a typed array of the preparation's output. raw: { inputs: typed array of the
   * described type, or an array of samples of different sizes, which are prepared one by one, count }. Throws ProtocolError
   * for a graph that does not match its description; DataError for a damaged sample.
   */
  async prepare({ inputs, count }) {
    const session = await this.session("preparation", () => this.graphs.preparation());
    checkPreparation(session, this.manifest);
    const { preparation } = this.manifest, { dtype, shape } = preparation, width = product(shape);
    const made = product(this.manifest.inputShape), alone = Array.isArray(inputs);
    const atOnce = alone ? 1 : Math.max(1, Math.min(PREPARED_SAMPLES, Math.floor(PREPARED_VALUES / Math.max(width, made))));
    let whole = null;
    for (let begin = 0; begin < count; begin += atOnce) {
      const end = Math.min(count, begin + atOnce);
      const raw = alone ? await decoded(inputs[begin], preparation)
        : { values: inputs.subarray(begin * width, end * width), shape };
      const part = tensorOf(dtype, raw.values, [end - begin, ...raw.shape]);
      const { output } = await this.inTurn(() => session.run({ input: part }, ["output"])).catch((error) => {
        const met = `the preparation fails on this device's samples: ${String(error.message).slice(0, 300)}`;
        throw new ProtocolError(met, "data-unusable");
      });
      if (output.data.length !== (end - begin) * made) {
        throw new ProtocolError("the preparation's output does not have the shape of the model's input");
      }
      whole ??= new output.data.constructor(count * made);
      whole.set(output.data, begin * made);
    }
    return whole;
  }

  /** Run the model once, on a part of `batches`. Throws ProtocolError if this browser cannot. */
  async check(batches) {
    for (const batch of batches) return this.answer(batch);
  }

  /** Return the model's output for one sample with these tensors, Float32Array of the output shape. */
  async predict(input, tensors) {
    const { output } = await this.answer({ inputs: input, targets: new Int32Array(1), count: 1 }, tensors);
    return output.data;
  }

  async answer(batch, tensors = this.tensors) {
    const session = await this.session("evaluation", () => this.graphs.evaluation());
    return this.run(session, batch, {}, ["loss", "output"], tensors);
  }

  /** Return the session of a graph, created on first use. Only the last training step is kept. */
  async session(key, graph) {
    if (!this.sessions.has(key)) {
      if (key.startsWith("step")) await this.forget((other) => other.startsWith("step"));
      const options = { executionProviders: ["wasm"], enableMemPattern: false };
      const { InferenceSession } = await runtime();
      const made = InferenceSession.create(await graph(), options);
      this.sessions.set(key, await made.catch((error) => {
        throw new ProtocolError(`this browser cannot load the model (${key}): ${String(error.message).slice(0, 300)}. Close other ` +
          "apps and tabs, and reload this page");
      }));
      keepRuntime().catch(() => {}); // the browser may have no storage left
    }
    return this.sessions.get(key);
  }

  /** Free the sessions whose key satisfies `which`. */
  async forget(which = () => true) {
    for (const [key, session] of this.sessions) {
      if (!which(key)) continue;
      this.sessions.delete(key);
      await session.release();
    }
  }

  /** Run a graph after the runs before it. */
  run(session, batch, more, wanted, tensors = this.tensors) {
    return this.inTurn(() => session.run(this.feeds(session, batch, more, tensors), wanted));
  }

  inTurn(run) {
    const turn = this.turn.then(run);
    this.turn = turn.catch(() => {});
    return turn;
  }

  feeds(session, { inputs, targets, count }, more, tensors) {
    const feeds = {};
    for (const { name, type, shape } of session.inputMetadata) {
      if (name === "input" || name === "target") {
        feeds[name] = tensorOf(type, name === "input" ? inputs : targets, [count, ...shape.slice(1)]);
      } else {
        const values = tensors.get(name) ?? this.frozen.get(name);
        feeds[name] = more[name] ?? tensorOf(type, values, this.dims.get(name));
      }
    }
    return feeds;
  }

  /** Return the active rows and columns that a step has as inputs, by input name. */
  activePlaces(session, mask) {
    const asked = {};
    for (const { name } of session.inputMetadata) {
      const [, axis, tensor] = /^(rows|columns):(.*)$/.exec(name) ?? [];
      if (!axis) continue;
      const spec = this.manifest.tensors.find((each) => each.name === tensor);
      const places = activeAxes(this.manifest, spec, mask)[axis === "rows" ? 0 : 1];
      asked[name] = tensorOf("int64", places, [places.length]);
    }
    return asked;
  }

  leaves(mask, only) {
    const leaves = new Map();
    for (const spec of this.manifest.kept) {
      if (!spec.trainable || (only && !only.has(spec.name))) continue;
      leaves.set(spec.name, new Leaf(this.tensors.get(spec.name), mask && placesOf(this.manifest, spec, mask)));
    }
    return leaves;
  }
}

/** Throw ProtocolError unless a session has one input and one output of the described types and shapes. */
function checkPreparation({ inputMetadata, outputMetadata }, { preparation, inputShape }) {
  const { dtype, free } = preparation, isFree = (length) => typeof length !== "number";
  const fits = (values, name, types, shape, open = []) => values.length === 1 && values[0].isTensor && values[0].name === name
    && types.includes(values[0].type) && values[0].shape.length === shape.length + 1
    && [null, ...shape].every((length, axis) => {
      const said = values[0].shape[axis];
      return axis === 0 || open.includes(axis - 1) ? isFree(said) : said === length;
    });
  const sound = fits(inputMetadata, "input", [dtype], preparation.shape, free)
    && fits(outputMetadata, "output", ["float32", "int64", "int32"], inputShape);
  if (!sound) throw new ProtocolError("the preparation's graph does not match the manifest");
}

/** The trained part of a parameter: all of it, or its values at some places, packed for the optimiser. */
class Leaf {
  constructor(whole, places) {
    this.whole = whole;
    this.places = places;
    this.values = places ? this.take(whole) : whole;
  }

  take(tensor) {
    const taken = new Float32Array(this.places.length);
    for (let i = 0; i < taken.length; i++) taken[i] = tensor[this.places[i]];
    return taken;
  }

  /** Return the leaf's gradient. computed: the parameter's, or the leaf's own. */
  gradient(computed) {
    return this.places && computed.length !== this.values.length ? this.take(computed) : computed;
  }

  writeBack() {
    if (this.places) for (let i = 0; i < this.places.length; i++) this.whole[this.places[i]] = this.values[i];
  }
}

function gradientsOf(leaves, answer, pull, start) {
  const gradients = new Map();
  for (const [name, leaf] of leaves) {
    const computed = answer[`grad:${name}`];
    if (!computed) continue;
    const gradient = leaf.gradient(computed.data);
    if (pull) {
      const centre = start.get(name), weight = fround(pull);
      for (let i = 0; i < gradient.length; i++) gradient[i] += fround(weight * fround(leaf.values[i] - centre[i]));
    }
    gradients.set(name, gradient);
  }
  return gradients;
}

/** Return a step's random inputs for `count` samples: uniform or normal noise, by input name. */
function noise(session, chance, count) {
  const drawn = {};
  for (const { name, shape } of session.inputMetadata) {
    const [, kind] = /^(uniform|normal)(_step)?$/.exec(name) ?? [];
    if (!kind) continue;
    const dims = shape.map((length) => (typeof length === "number" ? length : count));
    const size = product(dims);
    drawn[name] = tensorOf("float32", kind === "uniform" ? chance.random32(size) : chance.normal32(size), dims);
  }
  return drawn;
}

function tensorOf(type, values, dims) {
  if (type === "int64" && !(values instanceof BigInt64Array)) values = BigInt64Array.from(values, BigInt);
  if (type === "int32") values = Int32Array.from(values, Number);
  if (type === "float32" && !(values instanceof Float32Array)) values = Float32Array.from(values, Number);
  return new ort.Tensor(type, values, dims);
}

function best(scores) {
  let place = 0;
  for (let i = 1; i < scores.length; i++) if (scores[i] > scores[place]) place = i;
  return place;
}

function diverged(batch, loss, step, total, rate) {
  if (!batch.inputs.every((value) => Number.isFinite(Number(value)))) {
    const met = `the inputs of training step ${step} are not finite; leave out such samples`;
    return new TrainingDiverged(met, "training-diverged/inputs");
  }
  const met = `the loss is ${loss} at step ${step} of ${total}; lower the learning rate of ${rate} or set a clip`;
  return new TrainingDiverged(met, "training-diverged/loss");
}
