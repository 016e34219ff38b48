/** The signed statement about a model, and its comparison with a federation: `sparrow/protocol/publication.py`. */
import { BadPublication } from "./errors.js";
import { digestHex } from "./sha256.js";

const FIELDS = ["version", "federation", "edition", "task", "manifest", "graphs", "weights", "settings"];
const GRAPHS = ["skeleton", "step", "evaluation", "preparation"];
/** Fields of a manifest that a coordinator may change, or that are compared separately. */
const LEFT_OUT = new Set(["tensors", "blocks", "outputs", "first_sha256", ...GRAPHS.map((name) => `${name}_sha256`)]);
const SEEDS = /"seed":\s*\{"only":\s*\[[^\]]*\]/g, LONG = /([[,\s])(\d{16,19})(?=[\],\s])/g;

const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isDigest = (value) => typeof value === "string" && /^[0-9a-f]{64}$/.test(value);

/**
 * Return the content of a publication's statement, unchecked: { federation, edition, task, manifest, graphs, weights,
 * settings }, the last three Maps. Throws BadPublication if it cannot be read or has an unknown field, which may forbid
 * something.
 */
export function termsOf(statement) {
  let said = null;
  try {
    // Seeds above 2^53 are kept as text, as in all settings.
    said = JSON.parse(statement.replace(SEEDS, (seeds) => seeds.replace(LONG, '$1"$2"')));
  } catch { /* said below */ }
  const sound = isRecord(said) && Object.keys(said).every((name) => FIELDS.includes(name)) && said.version === 1
    && typeof said.federation === "string" && Number.isInteger(said.edition) && said.edition >= 1
    && typeof said.task === "string" && isDigest(said.manifest)
    && [said.graphs, said.weights].every((each) => isRecord(each) && Object.values(each).every(isDigest))
    && Object.keys(said.graphs).every((name) => GRAPHS.includes(name))
    && isRecord(said.settings) && Object.values(said.settings).every(isRange);
  if (!sound) throw new BadPublication("the publication cannot be read; reload this page, or ask the author to publish the model again");
  const [graphs, weights, settings] = [said.graphs, said.weights, said.settings].map((each) => new Map(Object.entries(each)));
  return { ...said, graphs, weights, settings };
}

function isRange(range) {
  if (!isRecord(range) || !Object.keys(range).every((name) => ["least", "most", "only"].includes(name))) return false;
  const { least, most, only } = range, bounds = [least, most].filter((bound) => bound !== undefined);
  if (only !== undefined) return bounds.length === 0 && Array.isArray(only) && !only.some((each) => typeof each === "object" && each !== null);
  return bounds.length > 0 && bounds.every(Number.isFinite) && !(least > most);
}

/**
 * Throw BadPublication if a federation's manifest differs from the signed terms by more than devices allow.
 * manifest, published: Manifests. No method of a page derives another model from the published one.
 */
export function checkTerms(terms, federation, manifest, published) {
  if (terms.federation !== federation) {
    throw new BadPublication(`the publication is for the federation ${terms.federation}, not for ${federation}`);
  }
  for (const name of GRAPHS) {
    const digest = manifest.files.get(name);
    if (digest === undefined || terms.graphs.get(name) === digest) continue;
    throw new BadPublication(`the ${name} of ${federation} is not the one that its publisher signed; ask the operator ` +
      "which model this is");
  }
  const other = differs(published.said, manifest.said);
  if (other !== null) throw new BadPublication(`${federation}: ${other} differs from the signed manifest`);
}

/** Return the name of a part of a manifest (its JSON) that differs from the published one and may not; else null. */
export function differs(published, manifest) {
  const byName = ({ tensors }) => new Map(tensors.map((spec) => [spec.name, spec]));
  const before = byName(published), after = byName(manifest);
  const alone = [...before.keys(), ...after.keys()].filter((name) => !before.has(name) || !after.has(name));
  if (alone.length) return `the tensor ${alone.sort()[0]}`;
  for (const [name, spec] of after) {
    const was = before.get(name), stays = spec.policy === "personal" && was.policy === "shared";
    if (!same(stays ? { ...spec, policy: "shared" } : spec, was)) return `the tensor ${name}`;
  }
  const fields = new Set([...Object.keys(published), ...Object.keys(manifest)]);
  for (const field of fields) {
    if (!LEFT_OUT.has(field) && !same(manifest[field] ?? null, published[field] ?? null)) return field;
  }
  const prepares = (each) => each.preparation_sha256 != null;
  return prepares(manifest) === prepares(published) ? null : "preparation_sha256";
}

/** Return whether two JSON values are the same, whatever the order of their keys. */
function same(one, other) {
  if (one === null || other === null || typeof one !== "object" || typeof other !== "object") return one === other;
  if (Array.isArray(one) !== Array.isArray(other)) return false;
  const keys = Object.keys(one);
  return keys.length === Object.keys(other).length
    && keys.every((key) => Object.hasOwn(other, key) && same(one[key], other[key]));
}

/** Throw BadPublication for a tensor whose first values are not the signed ones. values: packed, of the whole model. */
export async function checkWeights(terms, manifest, values) {
  let begin = 0;
  for (const { name, size } of manifest.shared) {
    const part = values.subarray(begin, begin + size), wanted = terms.weights.get(name);
    begin += size;
    if (wanted === undefined) continue;
    const found = await digestHex(new Uint8Array(part.buffer, part.byteOffset, part.byteLength));
    if (found !== wanted) throw new BadPublication(`${name}: its first values are not those that the publisher signed`);
  }
}
