// A device's samples from a file that a person chooses: NumPy's .npz or a table.

import { readArchive } from "./archive.js";
import { DataError } from "./errors.js";
import { fromArchive, fromTable } from "./samples.js";
import { readTable } from "./table.js";

const LARGEST_BYTES = 500_000_000;

/**
 * Read a file of samples and split it by `seed` if it is not split yet.
 * @param {File} file .npz, .csv or .tsv
 * @param {import("./manifest.js").Manifest} manifest the federation's
 * @param {bigint} seed
 * @returns {Promise<object>} see `fromTable`
 * @throws {DataError} for a file of another kind, one that cannot be read, and one that does not fit the model
 */
export async function readSamples(file, manifest, seed) {
  const kind = file.name.toLowerCase().match(/\.(npz|csv|tsv|txt)$/)?.[1];
  if (!kind) throw new DataError(`${file.name}: a .npz, .csv or .tsv file is wanted; save your samples as one of them`);
  if (file.size > LARGEST_BYTES) {
    const [met, most] = [file.size, LARGEST_BYTES].map((size) => Math.round(size / 1e6));
    throw new DataError(`${file.name}: ${met} MB; it must have at most ${most} MB: save fewer samples`);
  }
  const { preparation, targets, inputShape, outputShape, task } = manifest;
  const wanted = { preparation, targets, inputShape, outputs: outputShape.at(-1), seed, task };
  if (kind === "npz") return fromArchive(await readArchive(file), file.name, wanted);
  return fromTable(readTable(new Uint8Array(await file.arrayBuffer()), file.name), file.name, wanted);
}
