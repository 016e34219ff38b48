/**
 * numpy's random numbers, bit for bit: np.random.Generator(np.random.PCG64(seed)).
 *
 * 128-bit numbers are four words of 32 bits, lowest first. numpy keeps the unused half of a 64-bit output for the next
 * draw of 32 bits, whichever method asks for it; so does this.
 */

const WORD = 2 ** 32;

// The multiplier 0x2360ed051fc65da44385df649fccf645, lowest word first.
const M0 = 0x9fccf645;
const M1 = 0x4385df64;
const M2 = 0x1fc65da4;
const M3 = 0x2360ed05;

/**
 * The upper 32 bits of a product of two words. The product in double precision is wrong by at most 2^10; without its
 * exact lower half it is a multiple of 2^32 but for such an error.
 */
const high = (a, b) => ((a * b - (Math.imul(a, b) >>> 0)) / WORD + 0.5) >>> 0;

/** numpy's SeedSequence: words of 32 bits to `count` others, which depend on all bits of them. */
function spread(entropy, count) {
  let constant = 0x43b0d7e5;
  const hash = (value) => {
    const mixed = value ^ constant;
    constant = Math.imul(constant, 0x931e8875);
    const product = Math.imul(mixed, constant);
    return product ^ (product >>> 16);
  };
  const mix = (x, y) => {
    const difference = Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y);
    return difference ^ ((difference | 0) >>> 16);
  };
  const pool = Array.from({ length: 4 }, (_, i) => hash(entropy[i] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  }
  for (let from = 4; from < entropy.length; from++) {
    for (let to = 0; to < 4; to++) pool[to] = mix(pool[to], hash(entropy[from]));
  }
  constant = 0x8b51f9dd;
  return Uint32Array.from({ length: count }, (_, i) => {
    const mixed = pool[i % 4] ^ constant;
    constant = Math.imul(constant, 0x58f38ded);
    const product = Math.imul(mixed, constant);
    return product ^ (product >>> 16);
  });
}

/** A whole number of at least 0 in words of 32 bits, lowest first; 0 is one word. */
function words(number) {
  let rest = BigInt(number);
  if (rest < 0n) throw new RangeError(`the seed is ${number}; it must be a whole number of at least 0`);
  const found = [];
  do {
    found.push(Number(rest & 0xffffffffn));
    rest >>= 32n;
  } while (rest > 0n);
  return found;
}

const RIGHTMOST = 3.6541528853610088; // where the ziggurat's base layer ends and the tail begins
const AREA = 0.0049286732339746519; // of each of its 256 layers
const STEPS = 2 ** 23; // of a uniform number in one layer
const EDGE = Math.fround(RIGHTMOST);
const INVERSE = Math.fround(1 / RIGHTMOST);

let ziggurat = null;

/**
 * The normal density's 256 layers of equal area: width [256] of a step in layer i, inside [256], the steps that surely
 * lie below the curve, and height [256] of the curve at the layer's edge. Made when first asked for.
 */
function layers() {
  if (ziggurat) return ziggurat;
  const density = (x) => Math.exp(-0.5 * x * x);
  const width = new Float32Array(256);
  const inside = new Int32Array(256);
  const height = new Float32Array(256);
  let edge = RIGHTMOST;
  const base = AREA / density(edge);
  width[0] = base / STEPS;
  inside[0] = Math.round((edge / base) * STEPS);
  height[0] = 1;
  for (let i = 255; i > 0; i--) {
    width[i] = edge / STEPS;
    height[i] = density(edge);
    const next = i > 1 ? Math.sqrt(-2 * Math.log(AREA / edge + density(edge))) : 0;
    inside[i] = Math.round((next / edge) * STEPS);
    edge = next;
  }
  ziggurat = { width, inside, height };
  return ziggurat;
}

/** A stream of random numbers. */
export class Generator {
  #state = new Uint32Array(4);
  #increment = new Uint32Array(4);
  #half = -1; // what is left of the output drawn last, -1 where nothing is
  #low = 0; // the two words of the output drawn last
  #high = 0;

  /** np.random.Generator(np.random.PCG64(seed)); seed: a number or BigInt of at least 0, or an array of such. */
  static of(seed) {
    const made = new Generator();
    const [s2, s3, s0, s1, i2, i3, i0, i1] = spread([seed].flat().flatMap(words), 8); // upper halves come first
    made.#increment.set([(i0 << 1) | 1, (i1 << 1) | (i0 >>> 31), (i2 << 1) | (i1 >>> 31), (i3 << 1) | (i2 >>> 31)]);
    made.#step();
    const start = [s0, s1, s2, s3];
    let sum = 0;
    for (let i = 0; i < 4; i++) {
      sum = made.#state[i] + start[i] + Math.floor(sum / WORD);
      made.#state[i] = sum;
    }
    made.#step();
    return made;
  }

  /** Advance the state, multiplied and increased modulo 2^128, and make the next output of it. */
  #step() {
    const state = this.#state;
    const s0 = state[0];
    const s1 = state[1];
    const s2 = state[2];
    const s3 = state[3];
    // A sum of less than 2^21 words is exact in double precision; what exceeds a word is carried to the next.
    let sum = this.#increment[0] + (Math.imul(s0, M0) >>> 0);
    const w0 = sum >>> 0;
    sum = Math.floor(sum / WORD) + this.#increment[1] + high(s0, M0);
    sum += (Math.imul(s0, M1) >>> 0) + (Math.imul(s1, M0) >>> 0);
    const w1 = sum >>> 0;
    sum = Math.floor(sum / WORD) + this.#increment[2] + high(s0, M1) + high(s1, M0);
    sum += (Math.imul(s0, M2) >>> 0) + (Math.imul(s1, M1) >>> 0) + (Math.imul(s2, M0) >>> 0);
    const w2 = sum >>> 0;
    sum = Math.floor(sum / WORD) + this.#increment[3] + high(s0, M2) + high(s1, M1) + high(s2, M0);
    sum += Math.imul(s0, M3) + Math.imul(s1, M2) + Math.imul(s2, M1) + Math.imul(s3, M0);
    const w3 = sum >>> 0;
    state[0] = w0;
    state[1] = w1;
    state[2] = w2;
    state[3] = w3;
    // The output: both halves' difference, turned right by the uppermost six bits.
    const low = w0 ^ w2;
    const upper = w1 ^ w3;
    const turn = w3 >>> 26;
    const by = turn & 31;
    const first = turn < 32 ? low : upper;
    const second = turn < 32 ? upper : low;
    this.#low = by === 0 ? first : (first >>> by) | (second << (32 - by));
    this.#high = by === 0 ? second : (second >>> by) | (first << (32 - by));
  }

  /** The next 32 bits, a number 0 .. 2^32 - 1. */
  #next() {
    const kept = this.#half;
    if (kept >= 0) {
      this.#half = -1;
      return kept;
    }
    this.#step();
    this.#half = this.#high >>> 0;
    return this.#low >>> 0;
  }

  /** A float32 number in [0, 1), a multiple of 2^-24. */
  #share() {
    return (this.#next() >>> 8) / 2 ** 24;
  }

  /** The next 64 bits as a BigInt, as `PCG64.random_raw()`. */
  raw() {
    this.#step();
    return (BigInt(this.#high >>> 0) << 32n) | BigInt(this.#low >>> 0);
  }

  /** The next `count` outputs of 64 bits, as `PCG64.random_raw(count)`: Uint32Array [2 * count], lower words first. */
  rawWords(count) {
    const drawn = new Uint32Array(2 * count);
    for (let i = 0; i < drawn.length; i += 2) {
      this.#step();
      drawn[i] = this.#low;
      drawn[i + 1] = this.#high;
    }
    return drawn;
  }

  /** As `Generator.random(count, dtype=np.float32)`: Float32Array [count]. */
  random32(count) {
    const drawn = new Float32Array(count);
    for (let i = 0; i < count; i++) drawn[i] = this.#share();
    return drawn;
  }

  /**
   * As `Generator.standard_normal(count, dtype=np.float32)`: Float32Array [count].
   *
   * The one number of some 4,000 that lies beyond 3.65 is a logarithm, whose last bit depends on numpy's C library.
   */
  normal32(count) {
    const { width, inside, height } = layers();
    const drawn = new Float32Array(count);
    for (let i = 0; i < count; i++) drawn[i] = this.#normal(width, inside, height);
    return drawn;
  }

  #normal(width, inside, height) {
    for (;;) {
      const bits = this.#next();
      const layer = bits & 0xff;
      const steps = bits >>> 9;
      const size = Math.fround(steps * width[layer]);
      const value = bits & 0x100 ? -size : size;
      if (steps < inside[layer]) return value;
      if (layer === 0) return steps & 0x100 ? -this.#tail() : this.#tail();
      const span = Math.fround(height[layer - 1] - height[layer]);
      const drawn = Math.fround(Math.fround(span * this.#share()) + height[layer]);
      if (drawn < Math.exp(-0.5 * value * value)) return value;
    }
  }

  /** A normal number beyond RIGHTMOST (Marsaglia 1964), in numpy's single precision. */
  #tail() {
    for (;;) {
      const x = Math.fround(INVERSE * -Math.fround(Math.log1p(-this.#share())));
      const y = -Math.fround(Math.log1p(-this.#share()));
      if (Math.fround(y + y) > Math.fround(x * x)) return Math.fround(EDGE + x);
    }
  }

  /** As `Generator.permutation(count)`: 0 .. count - 1 in random order, Int32Array. `count` at most 2^31 - 1. */
  permutation(count) {
    return permutation(count, () => this.#next());
  }
}

/** Return 0 .. count - 1 in random order, Int32Array, as numpy's generators shuffle; next(): 32 random bits. */
export function permutation(count, next) {
  const order = Int32Array.from({ length: count }, (_, i) => i);
  for (let i = count - 1; i > 0; i--) {
    const j = upTo(i, next);
    const kept = order[i];
    order[i] = order[j];
    order[j] = kept;
  }
  return order;
}

/** A whole number 0 .. largest, each equally likely: as few bits as can hold it, drawn anew while they exceed it. */
function upTo(largest, next) {
  const mask = 0xffffffff >>> Math.clz32(largest);
  for (;;) {
    const bits = (next() & mask) >>> 0;
    if (bits <= largest) return bits;
  }
}
