/** A device's class frequencies in its outputs: `edge_sdk/device/label_prior.py`, where the papers are named. */
import { sum } from "./manifest.js";
import { eachBlock } from "./masks.js";
import { sha256, utf8 } from "./sha256.js";

const PSEUDO_COUNT = 0.5;
const TOLERANCE = 1e-3;
/** What an assignment's plan says, once it is decided: whether outputs are adjusted. */
const ADJUSTS = "adjusts_logits";
const VECTORS = 8;

/** What a device adds to the last layer's bias when values come in, and takes off it when they go out. */
export class LabelPrior {
  /**
   * offset: Float32Array, a value for each class; bias: the name of the tensor that has it; sketch: what is told of the
   * frequencies, null of fewer than two samples.
   */
  constructor(manifest, bias, offset, sketch) {
    Object.assign(this, { manifest, bias, offset, sketch });
  }

  /** Return the prior of these training targets; null where the federation adjusts nothing. Throws Error without a bias. */
  static of(manifest, settings, targets) {
    if (!settings.logit_adjustment) return null;
    const spec = manifest.outputBias;
    if (!spec) throw new Error("no page can take part here: the model's last layer has no bias for each class, which logit_adjustment needs");
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
        throw new Error("no page can take part here: the model's outputs do not follow its last layer's bias, which logit_adjustment needs");
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

/** Return whether a round adjusts outputs: where that depends on the label skew, its assignments say so. */
export const adjusts = ({ settings, plan }) => !settings.logit_adjustment_from || plan?.[ADJUSTS] === true;

/** Return whether devices are to tell of their labels, because it is not decided whether outputs are adjusted. */
export const asksForLabels = ({ settings, plan }) =>
  Boolean(settings.logit_adjustment && settings.logit_adjustment_from) && plan?.[ADJUSTS] === undefined;

/** Return what is told of class frequencies: `sparrow/protocol/skew.py`. */
export function sketchOf(counts) {
  const samples = sum(counts);
  if (samples < 2) return null;
  const signs = Array.from(counts, (_, label) => sha256(utf8(`label ${label}`))[0]);
  const sketch = Array.from({ length: VECTORS }, (_, j) =>
    sum(signs.map((bits, label) => ((bits >> j) & 1 ? 1 : -1) * counts[label] / samples)));
  return { sketch: sketch.map((value) => Math.max(-1, Math.min(1, value))), samples };
}

/** Return scores less their mean: what is left of them where outputs are logarithms of a softmax. */
function centred(scores) {
  const mean = sum(scores) / scores.length;
  return scores.map((value) => value - mean);
}
