/** numpy's older random numbers, np.random.RandomState, of which numpy promises that they never change. */

import { permutation } from "./pcg64.js";

const SIZE = 624;
const MIDDLE = 397;

/** The Mersenne twister of Matsumoto and Nishimura (1998), seeded as numpy does. */
export class RandomState {
  #state = new Uint32Array(SIZE);
  #at = SIZE;

  /** np.random.RandomState(key); key: an array of at least one number 0 .. 2^32 - 1. */
  static of(key) {
    const made = new RandomState();
    const state = made.#state;
    state[0] = 19650218;
    const mixed = (i) => state[i - 1] ^ (state[i - 1] >>> 30);
    for (let i = 1; i < SIZE; i++) state[i] = Math.imul(mixed(i), 1812433253) + i;
    let i = 1;
    const wrap = () => {
      if (++i < SIZE) return;
      state[0] = state[SIZE - 1];
      i = 1;
    };
    for (let turn = 0, j = 0; turn < Math.max(SIZE, key.length); turn++, j = (j + 1) % key.length, wrap()) {
      state[i] = (state[i] ^ Math.imul(mixed(i), 1664525)) + key[j] + j;
    }
    for (let turn = 1; turn < SIZE; turn++, wrap()) state[i] = (state[i] ^ Math.imul(mixed(i), 1566083941)) - i;
    state[0] = 0x80000000;
    return made;
  }

  /** As `RandomState.permutation(count)`: 0 .. count - 1 in random order, Int32Array. `count` at most 2^31 - 1. */
  permutation(count) {
    return permutation(count, () => this.#next());
  }

  #next() {
    if (this.#at === SIZE) this.#renew();
    let word = this.#state[this.#at++];
    word ^= word >>> 11;
    word ^= (word << 7) & 0x9d2c5680;
    word ^= (word << 15) & 0xefc60000;
    return word ^ (word >>> 18);
  }

  #renew() {
    const state = this.#state;
    for (let i = 0; i < SIZE; i++) {
      const next = state[(i + 1) % SIZE];
      const joined = (state[i] & 0x80000000) | (next & 0x7fffffff);
      state[i] = state[(i + MIDDLE) % SIZE] ^ (joined >>> 1) ^ (next & 1 ? 0x9908b0df : 0);
    }
    this.#at = 0;
  }
}
