/** A device's class frequencies in its outputs: `edge_sdk/device/label_prior.py`, where the papers are named. */
import { sum } from "./manifest.js";
import { eachBlock } from "./masks.js";
import { sha256, utf8 } from "./sha256.js";

const PSEUDO_COUNT = 0.5;
const TOLERANCE = 1e-3;
/** The plan's entry for the decision whether outputs are adjusted. */
const ADJUSTS = "adjusts_logits";
const VECTORS = 8;

/** The offset that a device adds to the last layer's bias on receipt and subtracts before it sends. */
export class LabelPrior {
  /**
   * offset: Float32Array, a value for each class. bias: the name of the bias tensor. sketch: the sketch of the frequencies
   * to send, null for fewer than two samples.
   */
  constructor(manifest, bias, offset, sketch) {
    Object.assign(this, { manifest, bias, offset, sketch });
  }

  /** Return the prior of these training targets; null if the federation does not use it. Throws Error without a bias. */
  static of(manifest, settings, targets) {
    if (!settings.logit_adjustment) return null;
    const spec = manifest.outputBias;
    if (!spec) throw new Error("pages cannot take part: logit_adjustment needs a bias for each class in the model's last layer");
    const seen = new Float64Array(spec.size);
    for (const target of targets) seen[Number(target)] += 1;
    const counts = seen.map((count) => count + PSEUDO_COUNT);
    const mean = sum(counts) / spec.size;
    const offset = Float32Array.from(counts, (count) => settings.logit_adjustment * Math.log(count / mean));
    return new LabelPrior(manifest, spec.name, offset, sketchOf(seen));
  }

  /** Throw Error unless the outputs of the model that is loaded follow the bias. */
  async check(engine, batches) {
    const [batch] = batches;
    const tensors = engine.read(), classes = this.offset.length;
    const before = (await engine.answer(batch, tensors)).output.data.slice();
    tensors.set(this.bias, tensors.get(this.bias).map((value, i) => value + this.offset[i]));
    const after = (await engine.answer(batch, tensors)).output.data;
    const wanted = centred(this.offset), largest = Math.max(1, ...this.offset.map(Math.abs));
    for (let begin = 0; begin < after.length; begin += classes) {
      const moved = centred(after.subarray(begin, begin + classes).map((value, i) => value - before[begin + i]));
      if (moved.some((value, i) => !(Math.abs(value - wanted[i]) <= TOLERANCE * largest))) {
        throw new Error("pages cannot take part: logit_adjustment needs outputs that change with the last layer's bias");
      }
    }
  }

  /** Return packed values with the prior (sign 1) or without it (sign -1). */
  moved(values, mask, sign) {
    const moved = values.slice();
    eachBlock(this.manifest, mask, (spec, places, begin, end) => {
      if (spec.name !== this.bias) return;
      for (let i = begin; i < end; i++) moved[i] += sign * this.offset[places ? places[i - begin] : i - begin];
    });
    return moved;
  }
}

/** Return whether a round adjusts outputs. If that depends on the label skew, the assignment's plan has the decision. */
export const adjusts = ({ settings, plan }) => !settings.logit_adjustment_from || plan?.[ADJUSTS] === true;

/** Return whether devices send a sketch of their labels, because it is not yet decided whether outputs are adjusted. */
export const asksForLabels = ({ settings, plan }) =>
  Boolean(settings.logit_adjustment && settings.logit_adjustment_from) && plan?.[ADJUSTS] === undefined;

/** Return the sketch of class frequencies: `sparrow/protocol/skew.py`. */
export function sketchOf(counts) {
  const samples = sum(counts);
  if (samples < 2) return null;
  const signs = Array.from(counts, (_, label) => sha256(utf8(`label ${label}`))[0]);
  const sketch = Array.from({ length: VECTORS }, (_, j) =>
    sum(signs.map((bits, label) => ((bits >> j) & 1 ? 1 : -1) * counts[label] / samples)));
  return { sketch: sketch.map((value) => Math.max(-1, Math.min(1, value))), samples };
}

/** Return scores minus their mean, because outputs may be logarithms of a softmax. */
function centred(scores) {
  const mean = sum(scores) / scores.length;
  return scores.map((value) => value - mean);
}
