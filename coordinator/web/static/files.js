// A device's samples from a file that a person chooses: NumPy's .npz or a table.

import { readArchive } from "./archive.js";
import { DataError, fromArchive, fromTable } from "./samples.js";
import { readTable } from "./table.js";

const LARGEST_BYTES = 500_000_000;

/**
 * Read a file of samples and split it where it is not split yet.
 * @param {File} file .npz or .csv
 * @param {{task: string, inputShape: number[], outputShape: number[]}} federation
 * @returns {Promise<{train: Part, validation: Part|null, test: Part|null}>} where a Part is {inputs: Float32Array,
 *   shape: number[] of one sample, targets: Int32Array, count: number}
 * @throws {DataError} where the file is of another kind, cannot be read, or does not fit the model
 */
export async function readSamples(file, { task, inputShape, outputShape }) {
  const kind = file.name.toLowerCase().match(/\.(npz|csv)$/)?.[1];
  if (!kind) throw new DataError(`${file.name}: a .npz or .csv file is wanted; save your samples as one of them`);
  if (file.size > LARGEST_BYTES) {
    const [met, most] = [file.size, LARGEST_BYTES].map((size) => Math.round(size / 1e6));
    throw new DataError(`${file.name}: ${met} MB, at most ${most} MB are wanted; save fewer samples`);
  }
  const [seed] = crypto.getRandomValues(new Uint32Array(1));
  const wanted = { inputShape, classes: outputShape.at(-1), seed, task };
  const parts =
    kind === "npz" ? fromArchive(await readArchive(file), wanted) : fromTable(readTable(await file.text()), wanted);
  const part = (one) => one && { ...one, shape: inputShape };
  return { train: part(parts.train), validation: part(parts.validation), test: part(parts.test) };
}
