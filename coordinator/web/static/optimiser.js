/** The optimisers of `edge_sdk/engines/optimiser.py`: SGD with momentum, Adam and AdamW, in float32, in place. */

const BETAS = [0.9, 0.999];
const EPSILON = 1e-8;
const { fround } = Math;

/** Update `leaves` (Map name -> Float32Array) by their gradients; the optimiser's state starts at zero. */
export class Optimiser {
  constructor(settings, learningRate, leaves) {
    this.kind = settings.optimizer;
    this.rate = learningRate;
    this.momentum = settings.momentum;
    this.decay = settings.weight_decay;
    this.clip = settings.clip ?? null;
    this.steps = 0;
    const count = this.kind === "sgd" ? Number(this.momentum > 0) : 2;
    this.slots = new Map([...leaves].map(([name, leaf]) =>
      [name, Array.from({ length: count }, () => new Float32Array(leaf.length))]));
    this.leaves = leaves;
  }

  /** Update the leaves that have a gradient (Map name -> Float32Array of the leaf's length, overwritten). */
  step(gradients) {
    this.steps += 1;
    const scale = this.clipped(gradients);
    for (const [name, gradient] of gradients) {
      if (scale < 1) for (let i = 0; i < gradient.length; i++) gradient[i] *= fround(scale);
      this.decayed(this.leaves.get(name), gradient);
      const move = this.kind === "sgd" ? sgd : adam;
      move(this, this.leaves.get(name), gradient, this.slots.get(name));
    }
  }

  clipped(gradients) {
    if (this.clip === null) return 1;
    let squares = 0;
    for (const gradient of gradients.values()) {
      for (let i = 0; i < gradient.length; i++) squares += gradient[i] * gradient[i];
    }
    return Math.min(1, this.clip / (Math.sqrt(squares) + 1e-6));
  }

  decayed(weight, gradient) {
    if (!this.decay) return;
    if (this.kind === "adamw") {
      const kept = fround(1 - this.rate * this.decay);
      for (let i = 0; i < weight.length; i++) weight[i] *= kept;
    } else {
      const decay = fround(this.decay);
      for (let i = 0; i < weight.length; i++) gradient[i] += fround(decay * weight[i]);
    }
  }
}

function sgd({ rate, momentum }, weight, gradient, [velocity]) {
  const eta = fround(rate), mu = fround(momentum);
  for (let i = 0; i < weight.length; i++) {
    let move = gradient[i];
    if (velocity) move = velocity[i] = fround(fround(velocity[i] * mu) + move);
    weight[i] -= fround(eta * move);
  }
}

function adam({ rate, steps }, weight, gradient, [first, second]) {
  const near = fround(1 - BETAS[0]), far = fround(BETAS[1]), rest = fround(1 - BETAS[1]);
  const root = fround(1 / Math.sqrt(1 - BETAS[1] ** steps)), eta = fround(rate / (1 - BETAS[0] ** steps));
  for (let i = 0; i < weight.length; i++) {
    const slope = gradient[i];
    first[i] += fround(near * fround(slope - first[i]));
    second[i] = fround(fround(second[i] * far) + fround(fround(slope * slope) * rest));
    const spread = fround(fround(fround(Math.sqrt(second[i])) * root) + fround(EPSILON));
    weight[i] -= fround(fround(first[i] / spread) * eta);
  }
}
