/** Signatures of publications, and fingerprints of publishers: `sparrow/protocol/signatures.py`. */
import { BadPublication } from "./errors.js";
import { hex, sha256, utf8 } from "./sha256.js";
import { sha512 } from "./sha512.js";

const LIBRARY = new URL("./runtime/noble-ed25519-3.2.0/index.js", import.meta.url).href; // that runtime.py pins
/** The prefix of a signed statement: signatures for another use do not match. */
const CONTEXT = "sparrow publication 1\0";

const bytesOf = (digits) => Uint8Array.from(digits.match(/../g), (pair) => parseInt(pair, 16));
const plain = (text) => text.replace(/[-: ]/g, "").toLowerCase();

let library = null;

/** Return @noble/ed25519, loaded on first use. Throws Error if the coordinator does not have it. */
async function ed25519() {
  library ??= import(LIBRARY).catch(() => {
    library = null;
    throw new Error("this coordinator lacks the library that checks signatures; ask its operator to run sparrow web again");
  });
  const found = await library;
  // Browsers have their own SHA-512 only on pages that came over HTTPS.
  found.hashes.sha512 = sha512;
  return found;
}

/** Throw BadPublication unless the publisher has signed the statement. */
export async function checkSignature({ statement, publisher, signature }) {
  const { verify } = await ed25519();
  if (!verify(bytesOf(signature), utf8(CONTEXT + statement), bytesOf(publisher), { zip215: false })) {
    throw new BadPublication("the signature of the publication is not valid: the coordinator or a proxy changed the " +
      "publication; ask its operator");
  }
}

/** Return the SHA-256 of a publication's statement. */
export const digestOf = ({ statement }) => hex(sha256(utf8(statement)));

/** Return the fingerprint of a public key: eight groups of four hexadecimal digits. */
export const fingerprint = (publisher) => grouped(hex(sha256(bytesOf(publisher))).slice(0, 32));

/** Return a fingerprint in groups of four digits. */
export const grouped = (text) => plain(text).match(/.{4}/g).join("-");

/** Return whether a text is a fingerprint. */
export const isFingerprint = (text) => /^[0-9a-f]{32}$/.test(plain(text));
