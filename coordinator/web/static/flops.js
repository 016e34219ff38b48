/** FLOPs of a model, counted from its manifest: `sparrow/protocol/flops.py`. */
import { COUNTED, sum } from "./manifest.js";
import { sizeOf } from "./masks.js";

/** Return the FLOPs of one sample's forward pass. */
export const forwardFlops = (manifest) => sum(layerFlops(manifest, null, false));

/** Return the FLOPs of training on `samples` samples; gradients of weights only between the neurons of `mask`. */
export function trainingFlops(manifest, samples, mask) {
  const forward = layerFlops(manifest, null, false), gradients = layerFlops(manifest, mask, true);
  const first = gradients.findIndex((flops) => flops > 0);
  const errors = first < 0 ? [] : forward.slice(first + 1);
  return samples * (sum(forward) + sum(errors) + sum(gradients));
}

/** Return the FLOPs of one sample through a model, whose weights of zero cost nothing. */
export function nonzeroFlops(manifest, tensors) {
  const specs = new Map(manifest.tensors.map((spec) => [spec.name, spec]));
  const count = (name) => tensors.get(name)?.reduce((all, value) => all + Number(value !== 0), 0) ?? specs.get(name).size;
  const layers = manifest.layers.filter((layer) => COUNTED.has(layer.kind));
  const matrices = (layer) => layer.tensors.filter((name) => specs.get(name).shape.length > 1);
  return sum(layers.map((layer) => 2 * layer.positions * sum(matrices(layer).map(count))));
}

function layerFlops(manifest, mask, trained) {
  const specs = new Map(manifest.tensors.map((spec) => [spec.name, spec]));
  return manifest.layers.filter((layer) => COUNTED.has(layer.kind)).map((layer) => {
    const weights = layer.tensors.map((name) => specs.get(name))
      .filter((spec) => spec.shape.length > 1 && (spec.trainable || !trained));
    return 2 * layer.positions * sum(weights.map((spec) => sizeOf(manifest, spec, mask)));
  });
}
