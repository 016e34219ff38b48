/** Picture files to their pixels: `sparrow/reading/pictures.py`. Runs in the page and in its worker. */
import { DataError } from "./errors.js";

const MOST_PIXELS = 4096; // of each side
const LARGEST_BYTES = 50_000_000;

/**
 * Read a picture as it is stored, upright, without any change of size or colours.
 *
 * file: its name stands in messages. raw: { shape: [H, W, 3], free } of the description. Returns { values: Uint8Array
 * [height * width * 3] of red, green and blue, shape: [height, width, 3], clear: whether some of it is transparent }.
 * Transparency is left out; a canvas multiplies by it, so that colours differ a little from the stored ones where it is not
 * full, and are black where nothing is seen. Throws DataError, naming the file.
 */
export async function readPixels(file, raw) {
  if (!file.size) throw new DataError(`${file.name}: is empty; copy the picture again`);
  if (file.size > LARGEST_BYTES) {
    const [met, most] = [file.size, LARGEST_BYTES].map((size) => Math.round(size / 1e6));
    throw new DataError(`${file.name}: ${met} MB; it must have at most ${most} MB: choose a smaller copy`);
  }
  const asStored = { imageOrientation: "from-image", premultiplyAlpha: "none", colorSpaceConversion: "none" };
  // Some browsers refuse words of the options that they do not know; upright is what they make of a picture then too.
  const picture = await createImageBitmap(file, asStored).catch(() => createImageBitmap(file)).catch(() => {
    throw new DataError(`${file.name}: cannot be read as a picture; copy it again, or save it as PNG, JPEG or WebP`);
  });
  try {
    const { width, height } = picture;
    checkSize(file.name, height, width, raw);
    const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true, colorSpace: "srgb" });
    context.drawImage(picture, 0, 0);
    const { data } = context.getImageData(0, 0, width, height), values = new Uint8Array(3 * height * width);
    let clear = false;
    for (let from = 0, to = 0; from < data.length; from += 4, to += 3) {
      [values[to], values[to + 1], values[to + 2]] = [data[from], data[from + 1], data[from + 2]];
      clear ||= data[from + 3] < 255;
    }
    return { values, shape: [height, width, 3], clear };
  } finally {
    picture.close();
  }
}

function checkSize(name, height, width, { shape: [high, wide], free }) {
  const met = `${name}: has ${width} x ${height} pixels`;
  if (Math.max(height, width) > MOST_PIXELS) {
    throw new DataError(`${met}; it must have at most ${MOST_PIXELS} x ${MOST_PIXELS}: make it smaller`);
  }
  if (!free.length && (height !== high || width !== wide)) {
    throw new DataError(`${met}, the federation's pictures have ${wide} x ${high}; scale it`);
  }
  if (height > high || width > wide) {
    throw new DataError(`${met}, the federation takes at most ${wide} x ${high}; make it smaller`);
  }
}
