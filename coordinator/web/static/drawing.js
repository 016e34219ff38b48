// A canvas to draw on by touch, pen, mouse and keyboard, and its conversion to the model's input.

const INK = 32; // grey levels from which a pixel counts as drawn
const SMALL_SIDE = 16; // pictures up to this side are placed as the 8 x 8 digits are, larger ones as MNIST is
const INNER = 20 / 28; // the share of an MNIST picture's side that the figure fills
const WIDEST = 7 / 8; // of an 8 x 8 picture's width: figures fill the height, and hardly ever the width
// The width of a stroke, in sides of the canvas: drawn digits have as much ink on average as those of the data sets.
const PEN = { small: 0.13, large: 0.1 };
const STEP = 1 / 40; // how far an arrow key moves the pen, in sides of the canvas; with Shift 4 times as far

/** Whether a picture of this shape is placed as the 8 x 8 digits are. */
const isSmall = ([, height, width]) => Math.max(height, width) <= SMALL_SIDE;

/**
 * Scale a part of a grey picture by exact area averaging. Values outside the picture count as 0.
 * @param {Float32Array} levels [height * width], row by row
 * @param {number} width
 * @param {number} height
 * @param {{left: number, top: number, width: number, height: number}} part in pixels, fractions allowed
 * @param {number} toWidth
 * @param {number} toHeight
 * @returns {Float32Array} [toHeight * toWidth]
 */
export function areaAverage(levels, width, height, part, toWidth, toHeight) {
  const columns = covers(part.left, part.width / toWidth, toWidth, width);
  const rows = covers(part.top, part.height / toHeight, toHeight, height);
  const averages = new Float32Array(toHeight * toWidth);
  rows.forEach((row, y) =>
    columns.forEach((column, x) => {
      let sum = 0;
      for (const [from, share] of row) {
        for (const [at, part] of column) sum += share * part * levels[from * width + at];
      }
      averages[y * toWidth + x] = sum;
    }),
  );
  return averages;
}

/** For each of `count` steps of `size` from `start`: the pixels below `limit` that it covers, and their shares. */
function covers(start, size, count, limit) {
  return Array.from({ length: count }, (_, index) => {
    const [from, to] = [start + index * size, start + (index + 1) * size];
    const covered = [];
    for (let pixel = Math.max(0, Math.floor(from)); pixel < Math.min(limit, Math.ceil(to)); pixel += 1) {
      const share = (Math.min(to, pixel + 1) - Math.max(from, pixel)) / size;
      if (share > 0) covered.push([pixel, share]);
    }
    return covered;
  });
}

/**
 * Place drawn figures as the data sets of handwritten digits do, in light grey levels on 0.
 *
 * Sides of more than 16 as in MNIST: the bounding box fills 20/28 of the side, the centre of mass lies in the middle.
 * Smaller ones as in the 8 x 8 digits of UCI: the bounding box fills the height and lies in the middle.
 * @param {Float32Array} levels [height * width], 0..255
 * @param {number} width
 * @param {number} height
 * @param {[1, number, number]} shape of the picture to return
 * @returns {Float32Array} [H * W], 0..255; all 0 if nothing is drawn
 */
export function placeInk(levels, width, height, shape) {
  const [, toHeight, toWidth] = shape;
  const figure = measure(levels, width, height);
  if (figure === null) return new Float32Array(toHeight * toWidth);
  const scale = isSmall(shape)
    ? Math.min(toHeight / figure.height, (WIDEST * toWidth) / figure.width)
    : Math.min((INNER * toHeight) / figure.height, (INNER * toWidth) / figure.width);
  const part = { width: toWidth / scale, height: toHeight / scale };
  const middle = isSmall(shape)
    ? { x: figure.left + figure.width / 2, y: figure.top + figure.height / 2 }
    : { x: figure.massX, y: figure.massY };
  part.left = within(middle.x - part.width / 2, figure.left + figure.width - part.width, figure.left);
  part.top = within(middle.y - part.height / 2, figure.top + figure.height - part.height, figure.top);
  return areaAverage(levels, width, height, part, toWidth, toHeight);
}

const within = (value, low, high) => Math.max(low, Math.min(high, value));

/** The bounding box and the centre of mass of the drawing, in pixels; null for an empty one. */
function measure(levels, width, height) {
  let [left, top, right, bottom, mass, massX, massY] = [width, height, -1, -1, 0, 0, 0];
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const level = levels[y * width + x];
      if (level < INK) continue;
      [left, right] = [Math.min(left, x), Math.max(right, x)];
      [top, bottom] = [Math.min(top, y), y];
      mass += level;
      massX += level * (x + 0.5);
      massY += level * (y + 0.5);
    }
  }
  if (mass === 0) return null;
  return { left, top, width: right - left + 1, height: bottom - top + 1, massX: massX / mass, massY: massY / mass };
}

/**
 * The picture that a model gets of a canvas with light strokes on a dark or transparent ground.
 * @param {HTMLCanvasElement} canvas
 * @param {[1, number, number]} shape
 * @returns {Float32Array} [H * W] grey levels 0..255, light on dark, placed as by `placeInk`
 */
export function toImage(canvas, shape) {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d", { willReadFrequently: true }).getImageData(0, 0, width, height);
  return placeInk(greyLevels(data), width, height, shape);
}

/**
 * The grey levels of pixels as a canvas gives them, darker where they are transparent.
 * @param {Uint8ClampedArray} pixels [n * 4]: red, green, blue, opacity
 * @returns {Float32Array} [n], 0..255
 */
export function greyLevels(pixels) {
  return Float32Array.from({ length: pixels.length / 4 }, (_, index) => {
    const [red, green, blue, opacity] = pixels.subarray(4 * index, 4 * index + 4);
    return ((0.299 * red + 0.587 * green + 0.114 * blue) * opacity) / 255;
  });
}

/** Drawing on a canvas. Its parent holds an element of class "pen" as well: where the pen of the keyboard is. */
export class Drawing {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {object} told
   * @param {() => void} told.drawn after each stroke, and after clearing
   * @param {(text: string) => void} told.say what a screen reader should say
   * @param {(label: number) => void} [told.keep] a digit key was pressed
   */
  constructor(canvas, { drawn, say, keep = null }) {
    this.canvas = canvas;
    this.#setEmpty(true);
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.told = { drawn, say, keep };
    this.pen = { x: canvas.width / 2, y: canvas.height / 2, down: false };
    this.marker = canvas.parentElement.querySelector(".pen");
    this.stroke = null; // the id of the pointer that draws
    this.setShape([1, 28, 28]);
    // A stroke is no swipe: without this, Chromium takes the tap that follows a quick stroke for the swipe's end.
    canvas.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => this.#end(event));
    canvas.addEventListener("keydown", (event) => this.#press(event));
    canvas.addEventListener("focus", () => this.#mark(canvas.matches(":focus-visible")));
    canvas.addEventListener("blur", () => this.#blur());
  }

  /** Choose the width of strokes for pictures of a shape, so that they are as wide as those of the data set. */
  setShape(shape) {
    this.width = (isSmall(shape) ? PEN.small : PEN.large) * this.canvas.width;
  }

  /** The picture that a model gets, see `toImage`. */
  image(shape) {
    return toImage(this.canvas, shape);
  }

  /** Wipe the canvas; the pen of the keyboard stays where it is, up. */
  clear() {
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.#setEmpty(true);
    this.pen.down = false;
    this.marker.classList.remove("down");
    this.told.drawn();
  }

  #line(from, to) {
    const { context } = this;
    context.strokeStyle = "#fff";
    context.lineWidth = this.width;
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x, to.y);
    context.stroke();
    this.#setEmpty(false);
  }

  #setEmpty(isEmpty) {
    this.isEmpty = isEmpty;
    this.canvas.parentElement.classList.toggle("empty", isEmpty);
  }

  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * this.canvas.width,
      y: ((event.clientY - box.top) / box.height) * this.canvas.height,
    };
  }

  #begin(event) {
    if (!event.isPrimary || event.button !== 0) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.#lift();
    this.#mark(false);
    this.stroke = event.pointerId;
    Object.assign(this.pen, this.#place(event));
    this.#line(this.pen, this.pen);
  }

  #move(event) {
    if (event.pointerId !== this.stroke) return;
    const between = event.getCoalescedEvents?.() ?? [];
    for (const at of between.length ? between : [event]) {
      const to = this.#place(at);
      this.#line(this.pen, to);
      Object.assign(this.pen, to);
    }
  }

  #end(event) {
    if (event.pointerId !== this.stroke) return;
    this.stroke = null;
    this.told.drawn();
  }

  #press(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const act = this.#actions()[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    const label = this.told.keep && /^[0-9]$/.test(event.key) ? Number(event.key) : null;
    if (!act && label === null) return;
    event.preventDefault();
    if (act) act(event.shiftKey ? 4 : 1);
    else if (!event.repeat) this.told.keep(label);
  }

  #actions() {
    const toggle = () => (this.pen.down ? this.#lift() : this.#lower());
    const clear = () => {
      this.clear();
      this.told.say("Cleared.");
    };
    return {
      ArrowLeft: (far) => this.#step(-far, 0), ArrowRight: (far) => this.#step(far, 0),
      ArrowUp: (far) => this.#step(0, -far), ArrowDown: (far) => this.#step(0, far),
      " ": toggle, p: toggle, Backspace: clear, c: clear,
    };
  }

  #step(right, down) {
    const far = STEP * this.canvas.width;
    const to = {
      x: within(this.pen.x + right * far, 0, this.canvas.width),
      y: within(this.pen.y + down * far, 0, this.canvas.height),
    };
    if (this.pen.down) this.#line(this.pen, to);
    Object.assign(this.pen, to);
    this.#mark(true);
  }

  #lower() {
    this.pen.down = true;
    this.#line(this.pen, this.pen);
    this.#mark(true);
    this.told.say("Pen down.");
  }

  #lift() {
    if (!this.pen.down) return;
    this.pen.down = false;
    this.#mark(true);
    this.told.say("Pen up.");
    this.told.drawn();
  }

  #blur() {
    this.#lift();
    this.#mark(false);
  }

  #mark(visible) {
    this.marker.hidden = !visible;
    this.marker.classList.toggle("down", this.pen.down);
    this.marker.style.left = `${(100 * this.pen.x) / this.canvas.width}%`;
    this.marker.style.top = `${(100 * this.pen.y) / this.canvas.height}%`;
  }
}

/**
 * Show a picture, one canvas pixel for each of its own.
 * @param {HTMLCanvasElement} canvas
 * @param {Float32Array} levels [C * H * W] grey levels 0..255
 * @param {[number, number, number]} shape [C, H, W], C 1 or 3
 */
export function showImage(canvas, levels, [channels, height, width]) {
  [canvas.width, canvas.height] = [width, height];
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < height * width; pixel += 1) {
    for (let colour = 0; colour < 3; colour += 1) {
      image.data[4 * pixel + colour] = levels[(channels === 3 ? colour : 0) * height * width + pixel];
    }
    image.data[4 * pixel + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
