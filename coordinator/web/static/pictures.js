// Pictures from files, the gallery or a camera, as grey levels.

import { areaAverage, greyLevels, placeInk } from "./drawing.js";
import { DataError } from "./errors.js";
import { isHandwriting } from "./words.js";

const LARGEST_BYTES = 50_000_000;
const LARGEST_SIDE = 2048; // of a canvas: phones refuse much larger ones
const INK_SIDE = 280; // the side in which handwriting is looked for
const FAINTEST = 0.35; // ink differs from the paper by this share of the largest difference, or is none

/**
 * Return a picture's middle, scaled down to the model's input.
 * @param {File|Blob} file in any format that the browser can show
 * @param {[number, number, number]} shape [C, H, W], C 1 (grey) or 3 (red, green, blue)
 * @returns {Promise<Float32Array>} [C * H * W] grey levels 0..255
 * @throws {DataError} if the file is too large or not a picture
 */
export const readPicture = (file, shape) => withPicture(file, (picture) => levelsOf(picture, shape));

/**
 * Return a picture of handwriting, placed as drawings: light ink on 0, whether ink or paper is darker.
 * @param {File|Blob} file
 * @param {[1, number, number]} shape
 * @returns {Promise<Float32Array>} [H * W] grey levels 0..255
 * @throws {DataError} if the file is too large, not a picture, or shows no handwriting
 */
export const readHandwriting = (file, shape) => withPicture(file, (picture) => handwritingOf(picture, shape));

/**
 * Return the middle of a picture or of a video's present frame, scaled down by area averaging.
 * @param {CanvasImageSource} picture
 * @param {[number, number, number]} shape [C, H, W], C 1 or 3
 * @returns {Float32Array} [C * H * W] grey levels 0..255
 */
export function levelsOf(picture, [channels, height, width]) {
  const pixels = middle(picture, height, width);
  const whole = { left: 0, top: 0, width: pixels.width, height: pixels.height };
  const average = (levels) => areaAverage(levels, pixels.width, pixels.height, whole, width, height);
  if (channels === 1) return average(greyLevels(pixels.data));
  const levels = new Float32Array(3 * height * width);
  for (let colour = 0; colour < 3; colour += 1) {
    const plane = Float32Array.from({ length: pixels.data.length / 4 }, (_, index) => pixels.data[4 * index + colour]);
    levels.set(average(plane), colour * height * width);
  }
  return levels;
}

/** As `levelsOf` for handwriting, see `readHandwriting`. Throws DataError without handwriting. */
export function handwritingOf(picture, shape) {
  const grey = levelsOf(picture, [1, INK_SIDE, INK_SIDE]);
  const edge = grey.filter((_, at) => at < INK_SIDE || at % INK_SIDE === 0 || at >= INK_SIDE * (INK_SIDE - 1));
  const paper = edge.sort()[edge.length >> 1];
  const differs = grey.map((level) => Math.abs(level - paper));
  const largest = differs.reduce((most, one) => Math.max(most, one), 0);
  if (largest < 40) {
    throw new DataError(
      "nothing is written on the picture: one dark figure on light paper, or light on dark, is wanted; take it closer",
    );
  }
  const least = FAINTEST * largest;
  const ink = differs.map((one) => (255 * Math.max(0, one - least)) / (largest - least));
  return placeInk(ink, INK_SIDE, INK_SIDE, shape);
}

/**
 * Return the readers of a task's pictures.
 * @param {string} task
 * @returns {{file: typeof readPicture, video: typeof levelsOf}} of a file, and of a video's present frame
 */
export function readerOf(task) {
  return isHandwriting(task) ? { file: readHandwriting, video: handwritingOf } : { file: readPicture, video: levelsOf };
}

async function withPicture(file, use) {
  const name = file.name ?? "the picture";
  if (file.size > LARGEST_BYTES) {
    const [met, most] = [file.size, LARGEST_BYTES].map((size) => Math.round(size / 1e6));
    throw new DataError(`${name}: ${met} MB; it must have at most ${most} MB: choose a smaller copy`);
  }
  const picture = await decode(file).catch(() => {
    throw new DataError(`${name}: not a picture that this browser can read; choose a JPEG, PNG or WebP file`);
  });
  try {
    return use(picture);
  } finally {
    picture.close?.();
  }
}

async function decode(file) {
  if (typeof createImageBitmap === "function") {
    try {
      return await createImageBitmap(file, { imageOrientation: "from-image" });
    } catch {
      // some browsers refuse formats here that they show in an <img>
    }
  }
  const address = URL.createObjectURL(file);
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    return image;
  } finally {
    URL.revokeObjectURL(address);
  }
}

/** Crop to the middle in the wanted ratio, then halve down to at least twice the wanted size: ImageData. */
function middle(picture, height, width) {
  const fullWidth = picture.videoWidth || picture.naturalWidth || picture.width;
  const fullHeight = picture.videoHeight || picture.naturalHeight || picture.height;
  const unit = Math.min(fullWidth / width, fullHeight / height);
  const [cropWidth, cropHeight] = [unit * width, unit * height];
  const fit = Math.min(1, LARGEST_SIDE / Math.max(cropWidth, cropHeight));
  let size = [Math.max(1, Math.round(cropWidth * fit)), Math.max(1, Math.round(cropHeight * fit))];
  const corner = [(fullWidth - cropWidth) / 2, (fullHeight - cropHeight) / 2];
  let canvas = drawn(picture, ...corner, cropWidth, cropHeight, ...size);
  while (size[0] >= 4 * width && size[1] >= 4 * height) {
    const half = size.map((side) => Math.ceil(side / 2));
    canvas = drawn(canvas, 0, 0, ...size, ...half);
    size = half;
  }
  return canvas.getContext("2d").getImageData(0, 0, ...size);
}

function drawn(source, left, top, width, height, toWidth, toHeight) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [toWidth, toHeight];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillRect(0, 0, toWidth, toHeight); // black below what is transparent
  context.imageSmoothingQuality = "high";
  context.drawImage(source, left, top, width, height, 0, 0, toWidth, toHeight);
  return canvas;
}

/** A live camera in a <video>; available only on pages that came over HTTPS. */
export class Camera {
  /** Whether the browser lets this page ask for a camera. */
  static get isThere() {
    return Boolean(navigator.mediaDevices?.getUserMedia);
  }

  /** @param {HTMLVideoElement} video */
  constructor(video) {
    this.video = video;
  }

  /** Open the camera at the back and show its picture. Throws DataError if it is refused. */
  async open() {
    try {
      const wanted = { video: { facingMode: "environment", width: { ideal: 640 } }, audio: false };
      this.video.srcObject = await navigator.mediaDevices.getUserMedia(wanted);
      await this.video.play();
    } catch (error) {
      this.close();
      throw new DataError(
        `the camera did not open (${error.message}); allow it for this page in the browser, or choose pictures`,
      );
    }
  }

  /** Return the present frame as a JPEG file, scaled down to at most `shape`, [H, W, 3]. */
  async photograph([height, width]) {
    const { videoWidth, videoHeight } = this.video, fit = Math.min(1, width / videoWidth, height / videoHeight);
    const size = [videoWidth, videoHeight].map((side) => Math.max(1, Math.round(fit * side)));
    const canvas = drawn(this.video, 0, 0, videoWidth, videoHeight, ...size);
    const content = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95));
    return new File([content], "the photograph", { type: content.type });
  }

  /** Release the camera. */
  close() {
    for (const track of this.video.srcObject?.getTracks() ?? []) track.stop();
    this.video.srcObject = null;
  }
}
