/** Signatures of publications, and fingerprints of publishers: `sparrow/protocol/signatures.py`. */
import { BadPublication } from "./errors.js";
import { hex, sha256, utf8 } from "./sha256.js";
import { sha512 } from "./sha512.js";

const LIBRARY = new URL("./runtime/noble-ed25519-3.2.0/index.js", import.meta.url).href; // that runtime.py pins
/** Begins what is signed, so that no signature of another use counts. */
const CONTEXT = "sparrow publication 1\0";

const bytesOf = (digits) => Uint8Array.from(digits.match(/../g), (pair) => parseInt(pair, 16));
const plain = (text) => text.replace(/[-: ]/g, "").toLowerCase();

let library = null;

/** Return @noble/ed25519, loaded when it is first needed. Throws Error where the coordinator does not have it. */
async function ed25519() {
  library ??= import(LIBRARY).catch(() => {
    library = null;
    throw new Error("this coordinator cannot give what checks the signature of its model: its operator runs sparrow web " +
      "again");
  });
  const found = await library;
  // Browsers have their own only where a page came over HTTPS.
  found.hashes.sha512 = sha512;
  return found;
}

/** Throw BadPublication unless the publisher has signed the statement. */
export async function checkSignature({ statement, publisher, signature }) {
  const { verify } = await ed25519();
  if (!verify(bytesOf(signature), utf8(CONTEXT + statement), bytesOf(publisher), { zip215: false })) {
    throw new BadPublication("the signature of the publication is not that of its publisher: the coordinator, or " +
      "somebody on the way, has changed it");
  }
}

/** Return the SHA-256 of a publication's statement. */
export const digestOf = ({ statement }) => hex(sha256(utf8(statement)));

/** Return the fingerprint of a public key: eight groups of four hexadecimal digits. */
export const fingerprint = (publisher) => grouped(hex(sha256(bytesOf(publisher))).slice(0, 32));

/** Return a fingerprint in groups of four, however it was grouped. */
export const grouped = (text) => plain(text).match(/.{4}/g).join("-");

/** Return whether a text is a fingerprint. */
export const isFingerprint = (text) => /^[0-9a-f]{32}$/.test(plain(text));
