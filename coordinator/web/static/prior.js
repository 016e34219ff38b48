/** A device's class frequencies in its outputs: `edge_sdk/device/label_prior.py`, where the papers are named. */
import { sum } from "./manifest.js";
import { eachBlock } from "./masks.js";

const PSEUDO_COUNT = 0.5;
const TOLERANCE = 1e-3;

/** What a device adds to the last layer's bias when values come in, and takes off it when they go out. */
export class LabelPrior {
  /** offset: Float32Array, a value for each class; bias: the name of the tensor that has it. */
  constructor(manifest, bias, offset) {
    Object.assign(this, { manifest, bias, offset });
  }

  /** Return the prior of these training targets; null where the federation adjusts nothing. Throws Error without a bias. */
  static of(manifest, settings, targets) {
    if (!settings.logit_adjustment) return null;
    const spec = manifest.outputBias;
    if (!spec) throw new Error("no page can take part here: the model's last layer has no bias for each class, which logit_adjustment needs");
    const counts = new Float64Array(spec.size).fill(PSEUDO_COUNT);
    for (const target of targets) counts[Number(target)] += 1;
    const mean = sum(counts) / spec.size;
    const offset = Float32Array.from(counts, (count) => settings.logit_adjustment * Math.log(count / mean));
    return new LabelPrior(manifest, spec.name, offset);
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

/** Return scores less their mean: what is left of them where outputs are logarithms of a softmax. */
function centred(scores) {
  const mean = sum(scores) / scores.length;
  return scores.map((value) => value - mean);
}
