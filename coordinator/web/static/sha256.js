/** SHA-256 (FIPS 180-4), also where a page has no crypto.subtle because it did not come over HTTPS. */

const ROUND = new Int32Array(64);
const START = new Int32Array(8);
const BLOCK = 64; // bytes

/** The first 32 bits of a root's fractional part. */
const fraction = (root) => Math.floor((root - Math.floor(root)) * 2 ** 32) | 0;

let primes = 0;
for (let number = 2; primes < 64; number++) {
  let divisor = 2;
  while (number % divisor !== 0) divisor++;
  if (divisor < number) continue;
  if (primes < 8) START[primes] = fraction(Math.sqrt(number));
  ROUND[primes++] = fraction(Math.cbrt(number));
}

const schedule = new Int32Array(64); // scratch of one call of `compress`

/** Mix `bytes[start .. start + 64]` into the state, Int32Array [8]. */
function compress(state, bytes, start) {
  const w = schedule;
  for (let i = 0, at = start; i < 16; i++, at += 4) {
    w[i] = (bytes[at] << 24) | (bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3];
  }
  for (let i = 16; i < 64; i++) {
    const x = w[i - 15];
    const y = w[i - 2];
    const low = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
    const high = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
    w[i] = (w[i - 16] + low + w[i - 7] + high) | 0;
  }
  let a = state[0];
  let b = state[1];
  let c = state[2];
  let d = state[3];
  let e = state[4];
  let f = state[5];
  let g = state[6];
  let h = state[7];
  for (let i = 0; i < 64; i++) {
    const turned = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
    const first = (h + turned + (g ^ (e & (f ^ g))) + ROUND[i] + w[i]) | 0;
    const other = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
    const second = (other + ((a & b) | (c & (a | b)))) | 0;
    h = g;
    g = f;
    f = e;
    e = (d + first) | 0;
    d = c;
    c = b;
    b = a;
    a = (first + second) | 0;
  }
  state[0] += a;
  state[1] += b;
  state[2] += c;
  state[3] += d;
  state[4] += e;
  state[5] += f;
  state[6] += g;
  state[7] += h;
}

/** A digest of bytes that come in pieces. */
export class Sha256 {
  #state = START.slice();
  #rest = new Uint8Array(BLOCK); // bytes of a block that is not whole yet
  #count = 0; // bytes so far

  /** Take `bytes` (Uint8Array) after those that came before. Returns this. */
  update(bytes) {
    let at = 0;
    const held = this.#count % BLOCK;
    this.#count += bytes.length;
    if (held > 0) {
      at = Math.min(BLOCK - held, bytes.length);
      this.#rest.set(bytes.subarray(0, at), held);
      if (held + at < BLOCK) return this;
      compress(this.#state, this.#rest, 0);
    }
    for (; at + BLOCK <= bytes.length; at += BLOCK) compress(this.#state, bytes, at);
    this.#rest.set(bytes.subarray(at));
    return this;
  }

  /** The digest of what came so far, Uint8Array [32]; more may come afterwards. */
  digest() {
    const last = this.clone();
    const padding = new Uint8Array(((119 - (this.#count % BLOCK)) % BLOCK) + 9);
    const view = new DataView(padding.buffer);
    padding[0] = 0x80;
    view.setUint32(padding.length - 8, Math.floor(this.#count / 2 ** 29));
    view.setUint32(padding.length - 4, (this.#count * 8) % 2 ** 32);
    last.update(padding);
    const bytes = new DataView(new ArrayBuffer(32));
    last.#state.forEach((word, i) => bytes.setInt32(4 * i, word));
    return new Uint8Array(bytes.buffer);
  }

  /** A second digest of the same beginning, which goes on by itself. */
  clone() {
    const other = new Sha256();
    other.#state.set(this.#state);
    other.#rest.set(this.#rest);
    other.#count = this.#count;
    return other;
  }
}

/** The SHA-256 digest of `bytes` (Uint8Array), Uint8Array [32]. */
export const sha256 = (bytes) => new Sha256().update(bytes).digest();

/** `bytes` in lower-case hexadecimal digits. */
export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

const encoder = new TextEncoder();

/** `text` in UTF-8, Uint8Array. */
export const utf8 = (text) => encoder.encode(text);

/** The SHA-256 digest of `bytes` (Uint8Array) in hexadecimal digits, by the browser's own code where it has any. */
export async function digestHex(bytes) {
  const own = globalThis.crypto?.subtle;
  return hex(own ? new Uint8Array(await own.digest("SHA-256", bytes)) : sha256(bytes));
}
