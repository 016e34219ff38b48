/** SHA-512 (FIPS 180-4), also where a page has no crypto.subtle. A word of 64 bits is two of 32: high, low. */

const BLOCK = 128; // bytes
const BITS = 64n;

/** The integer part of a root, by Newton's method. */
function rootOf(number, power) {
  const less = BigInt(power - 1);
  let root = 1n << (BigInt(number.toString(2).length) / BigInt(power) + 1n);
  for (;;) {
    const next = (less * root + number / root ** less) / BigInt(power);
    if (next >= root) return root;
    root = next;
  }
}

/** The first 64 bits of the fractional parts of primes' roots, as pairs high, low. */
function fractions(count, power) {
  const words = new Int32Array(2 * count);
  let found = 0;
  for (let number = 2; found < count; number++) {
    let divisor = 2;
    while (number % divisor !== 0) divisor++;
    if (divisor < number) continue;
    const root = rootOf(BigInt(number) << (BITS * BigInt(power)), power);
    words[2 * found] = Number(BigInt.asIntN(32, root >> 32n));
    words[2 * found + 1] = Number(BigInt.asIntN(32, root));
    found++;
  }
  return words;
}

const START = fractions(8, 2);
const ROUND = fractions(80, 3);
const schedule = new Int32Array(160); // scratch of one call of `compress`

/** The lower half of a sum is exact as a number below 2^53; what lies above 2^32 carries over. */
const carried = (low) => Math.floor(low / 2 ** 32);

/** Mix `bytes[start .. start + 128]` into the state, Int32Array [16]. */
function compress(state, bytes, start) {
  const w = schedule;
  for (let i = 0, at = start; i < 32; i++, at += 4) {
    w[i] = (bytes[at] << 24) | (bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3];
  }
  for (let i = 32; i < 160; i += 2) {
    const xh = w[i - 30];
    const xl = w[i - 29];
    const yh = w[i - 4];
    const yl = w[i - 3];
    // sigma0: right by 1, by 8, shifted by 7; sigma1: right by 19, by 61, shifted by 6.
    const ah = ((xh >>> 1) | (xl << 31)) ^ ((xh >>> 8) | (xl << 24)) ^ (xh >>> 7);
    const al = ((xl >>> 1) | (xh << 31)) ^ ((xl >>> 8) | (xh << 24)) ^ ((xl >>> 7) | (xh << 25));
    const bh = ((yh >>> 19) | (yl << 13)) ^ ((yl >>> 29) | (yh << 3)) ^ (yh >>> 6);
    const bl = ((yl >>> 19) | (yh << 13)) ^ ((yh >>> 29) | (yl << 3)) ^ ((yl >>> 6) | (yh << 26));
    const low = (al >>> 0) + (bl >>> 0) + (w[i - 31] >>> 0) + (w[i - 13] >>> 0);
    w[i] = (ah + bh + w[i - 32] + w[i - 14] + carried(low)) | 0;
    w[i + 1] = low | 0;
  }
  const s = state.slice();
  for (let i = 0; i < 160; i += 2) {
    const [ah, al, eh, el] = [s[0], s[1], s[8], s[9]];
    // Sigma1 of e: right by 14, 18 and 41; Sigma0 of a: right by 28, 34 and 39.
    const th = ((eh >>> 14) | (el << 18)) ^ ((eh >>> 18) | (el << 14)) ^ ((el >>> 9) | (eh << 23));
    const tl = ((el >>> 14) | (eh << 18)) ^ ((el >>> 18) | (eh << 14)) ^ ((eh >>> 9) | (el << 23));
    const ch = (eh & s[10]) ^ (~eh & s[12]);
    const cl = (el & s[11]) ^ (~el & s[13]);
    const firstLow = (s[15] >>> 0) + (tl >>> 0) + (cl >>> 0) + (ROUND[i + 1] >>> 0) + (w[i + 1] >>> 0);
    const firstHigh = (s[14] + th + ch + ROUND[i] + w[i] + carried(firstLow)) | 0;
    const uh = ((ah >>> 28) | (al << 4)) ^ ((al >>> 2) | (ah << 30)) ^ ((al >>> 7) | (ah << 25));
    const ul = ((al >>> 28) | (ah << 4)) ^ ((ah >>> 2) | (al << 30)) ^ ((ah >>> 7) | (al << 25));
    const mh = (ah & s[2]) ^ (ah & s[4]) ^ (s[2] & s[4]);
    const ml = (al & s[3]) ^ (al & s[5]) ^ (s[3] & s[5]);
    const nextLow = (s[7] >>> 0) + (firstLow >>> 0);
    const nextHigh = (s[6] + firstHigh + carried(nextLow)) | 0;
    const allLow = (firstLow >>> 0) + (ul >>> 0) + (ml >>> 0);
    const allHigh = (firstHigh + uh + mh + carried(allLow)) | 0;
    s.copyWithin(2, 0, 14); // b to h become what a to g were
    s[8] = nextHigh;
    s[9] = nextLow | 0;
    s[0] = allHigh;
    s[1] = allLow | 0;
  }
  for (let i = 0; i < 16; i += 2) {
    const low = (state[i + 1] >>> 0) + (s[i + 1] >>> 0);
    state[i] = (state[i] + s[i] + carried(low)) | 0;
    state[i + 1] = low | 0;
  }
}

/** The SHA-512 digest of `bytes` (Uint8Array), Uint8Array [64]. */
export function sha512(bytes) {
  const state = START.slice();
  const whole = bytes.length - (bytes.length % BLOCK);
  for (let at = 0; at < whole; at += BLOCK) compress(state, bytes, at);
  const rest = bytes.length - whole;
  const last = new Uint8Array(rest < BLOCK - 16 ? BLOCK : 2 * BLOCK);
  last.set(bytes.subarray(whole));
  last[rest] = 0x80;
  const view = new DataView(last.buffer);
  view.setUint32(last.length - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(last.length - 4, (bytes.length * 8) % 2 ** 32);
  for (let at = 0; at < last.length; at += BLOCK) compress(state, last, at);
  const digest = new DataView(new ArrayBuffer(64));
  state.forEach((word, i) => digest.setInt32(4 * i, word));
  return new Uint8Array(digest.buffer);
}
