// "Your data": samples drawn, photographed, recorded or read from files, each with its class.

import { Drawing, showImage } from "./drawing.js";
import { readFolder, readMedium } from "./folders.js";
import { Camera, readerOf } from "./pictures.js";
import { MotionPanel } from "./recording.js";
import { DataError } from "./errors.js";
import { givenShape, mediumOf, rawSample } from "./raw.js";
import { listed } from "./labels.js";
import { scaled } from "./samples.js";
import { Microphone, readRecording } from "./sounds.js";
import { $, classNames, element, many, put, show } from "./words.js";

const WAYS = { draw: "Draw", pictures: "Pictures", sounds: "Sounds", motion: "Motion", folder: "Folder", file: "File" };
const LONGEST_RECORDING = 30; // seconds

/** Return the ways to give samples of a federation, the best one first: some of `WAYS`. */
export function waysOf(federation) {
  const medium = mediumOf(federation.raw);
  if (medium) return [`${medium}s`, "folder"];
  const shape = givenShape(federation) ?? [];
  if (shape.length === 3 && shape[0] === 1) return ["draw", "pictures", "file"];
  if (shape.length === 3 && shape[0] === 3) return ["pictures", "file"];
  return shape.join() === "6,64" ? ["motion", "file"] : ["file"];
}

/** Return a drawing or picture in grey levels, or a record, as the federation's samples: raw, or on its task's scale. */
export function sampleOf({ raw, task, inputShape }, values) {
  return raw ? rawSample(values, raw) : scaled(task, values, inputShape);
}

/**
 * Return a chosen file as a sample of the federation: unchanged if samples may have any size, else the middle of the
 * picture in the federation's size. Throws DataError, naming the file.
 */
export async function chosenSample(federation, file) {
  const { raw, task } = federation, shape = givenShape(federation);
  if (mediumOf(raw) && !shape) return (await readMedium(file, raw)).kept;
  return sampleOf(federation, await readerOf(task).file(file, shape));
}

/** Return the camera's picture as a sample of the federation, as `chosenSample`. */
export async function photographed(federation, camera) {
  const { raw, task } = federation, shape = givenShape(federation);
  if (shape) return sampleOf(federation, readerOf(task).video(camera.video, shape));
  return (await readMedium(await camera.photograph(raw.shape), raw)).kept;
}

/** Record a sound until the microphone is stopped; returns a sample of the federation, or null if it was discarded. Throws DataError. */
export async function recordedSample({ raw }, microphone, began) {
  const file = await microphone.record(Math.min(LONGEST_RECORDING, raw.shape[0] / raw.rate), began);
  return file && readRecording(file, raw);
}

/** The section in which a user gives samples. */
export class Giving {
  /**
   * @param {object} told
   * @param {(message: object, transfer?: Transferable[]) => void} told.send to the worker
   * @param {(message: object) => Promise<object>} told.request sends a command to the worker, see page.js
   * @param {(question: object) => Promise<boolean>} told.ask a question with two answers
   */
  constructor({ send, request, ask }) {
    this.send = send;
    this.request = request;
    this.ask = ask;
    this.federation = null;
    this.chips = {}; // way -> the buttons of its classes
    this.label = 0; // of the next pictures or sounds
    this.drawing = new Drawing($("draw"), {
      drawn: () => {},
      say: (text) => this.say(text),
      keep: (label) => this.#attempt(() => this.#keep(label)),
    });
    this.motion = new MotionPanel({
      found: (values, label, group) => this.#add(values, label, group),
      failed: (error) => this.fail(error),
    });
    this.camera = new Camera($("camera-view"));
    this.microphone = new Microphone();
    this.#listen();
  }

  #listen() {
    const press = (id, act) => $(id).addEventListener("click", () => this.#attempt(act));
    press("draw-clear", () => this.drawing.clear());
    press("picture-choose", () => $("picture-files").click());
    press("picture-take", () => $("picture-camera").click());
    press("picture-live", () => this.#openCamera());
    press("camera-shoot", () => this.#shoot());
    press("camera-close", () => this.#closeCamera());
    press("sound-choose", () => $("sound-files").click());
    press("sound-record", () => this.#record());
    press("folder-choose", () => $("folder").click());
    press("motion-record", () => this.motion.toggle());
    press("file-choose", () => $("file").click());
    press("samples-clear", () => this.#forget());
    const chosen = (id, act) => $(id).addEventListener("change", () => this.#attempt(() => act($(id))));
    for (const id of ["picture-files", "picture-camera", "sound-files"]) chosen(id, (input) => this.#files(input));
    chosen("folder", (input) => this.#folder(input));
    chosen("file", (input) => this.#file(input));
  }

  /** Draw a state of the worker. */
  draw({ federation, samples, phase, secure }) {
    $("data").hidden = federation === null || phase === "opening";
    if (federation === null) return;
    if (this.federation?.name !== federation.name) this.#begin(federation);
    const counts = samples.perClass;
    for (const chips of Object.values(this.chips)) {
      chips.forEach((chip, label) => put(chip.querySelector("span.count"), String(counts[label] ?? 0)));
    }
    const names = counts.map((count, label) => [samples.names?.[label] || this.names[label], count]).filter(([name]) => name);
    for (const id of ["file-classes", "folder-classes"]) put($(id), names.map(([name, count]) => `${name}: ${count}`).join(", "));
    const { train, validation, test } = samples;
    put($("samples"), train + validation + test === 0
      ? "No samples yet"
      : `${many(train + validation + test, "sample")}: ${train} to train, ${validation} to check, ${test} to test`);
    put($("lacks"), samples.enough ? "This is enough to take part. More samples make the model better." : samples.lacks);
    show($("source"), samples.source === "files" ? samples.said : "");
    $("samples-clear").hidden = samples.source === "none" || train + validation + test === 0;
    const used = givenShape(federation) ? "The middle square of each picture is used." : "Pictures may have any size.";
    put($("picture-hint"), secure ? used : `${used} A live camera in this page needs HTTPS.`);
    put($("sound-hint"), soundHint(federation, secure));
  }

  /** Show why samples were refused: an Error, or a text. */
  fail(error) {
    show($("data-problem"), error instanceof Error ? error.message : error);
    if (error instanceof Error && !(error instanceof DataError)) console.error(error);
  }

  /** Show a result, also to screen readers. */
  say(text) {
    put($("data-said"), text);
  }

  async #attempt(act) {
    show($("data-problem"), "");
    try {
      await act();
    } catch (error) {
      this.fail(error);
    }
  }

  #begin(federation) {
    this.federation = federation;
    this.shape = givenShape(federation) ?? federation.inputShape;
    const { names, task, outputShape } = federation;
    this.names = classNames(task, names.length || outputShape.at(-1), names);
    this.#tabs(waysOf(federation));
    this.drawing.setShape(this.shape);
    this.chips = {
      draw: this.#classes($("draw-classes"), (label) => this.#attempt(() => this.#keep(label))),
      pictures: this.#classes($("picture-classes"), (label) => this.#choose("pictures", label)),
      motion: this.#classes($("motion-classes"), (label) => this.#choose("motion", label)),
    };
    this.chips.sounds = this.#classes($("sound-classes"), (label) => this.#choose("sounds", label));
    for (const way of ["pictures", "sounds", "motion"]) this.#choose(way, 0);
    [$("picture-live").hidden, $("picture-take").hidden] = [!Camera.isThere, Camera.isThere];
    $("camera").classList.toggle("whole", givenShape(federation) === null);
    $("sound-record").hidden = !Microphone.isThere;
    put($("file-hint"), hintOf(federation));
    put($("folder-hint"), folderHint(federation));
  }

  #tabs(ways) {
    const tabs = ways.map((way) => {
      const names = { id: `tab-${way}`, "aria-controls": `panel-${way}` };
      return element("button", { type: "button", role: "tab", ...names }, WAYS[way]);
    });
    tabs.forEach((tab, index) => {
      tab.addEventListener("click", () => this.#open(ways, index));
      tab.addEventListener("keydown", (event) => {
        const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        this.#open(ways, (to + tabs.length) % tabs.length);
        $("ways").querySelector("[aria-selected=true]").focus();
      });
    });
    $("ways").replaceChildren(...tabs);
    $("ways").hidden = ways.length === 1;
    this.#open(ways, 0);
  }

  #open(ways, chosen) {
    for (const way of Object.keys(WAYS)) $(`panel-${way}`).hidden = way !== ways[chosen];
    ways.forEach((way, index) => {
      $(`tab-${way}`).setAttribute("aria-selected", index === chosen);
      $(`tab-${way}`).tabIndex = index === chosen ? 0 : -1;
    });
    this.#closeCamera();
    this.microphone.stop(false);
    this.motion.stop();
    this.say("");
    show($("data-problem"), "");
  }

  #classes(box, press) {
    const chips = this.names.map((name, label) => {
      const unit = element("span", { class: "unseen" }, " samples");
      const count = element("small", {}, element("span", { class: "count" }, "0"), unit);
      const chip = element("button", { type: "button", class: "chip" }, element("span", {}, name), " ", count);
      chip.addEventListener("click", () => press(label));
      return chip;
    });
    box.classList.toggle("long", this.names.some((name) => name.length > 5));
    box.replaceChildren(...chips);
    return chips;
  }

  #choose(way, label) {
    this.chips[way].forEach((chip, index) => chip.setAttribute("aria-pressed", index === label));
    if (way === "motion") this.motion.choose(label);
    else this.label = label;
  }

  /** Add a drawing or record. group: shared by the samples of one recording, which are all used for training, or none. */
  #add(values, label, group) {
    this.#give([sampleOf(this.federation, values)], label, group);
  }

  /** Send samples of a class to the worker: one by one, or together if they may have different sizes. */
  #give(samples, label, group) {
    const alone = mediumOf(this.federation.raw) !== null;
    for (const inputs of alone ? [samples] : samples) {
      this.send({ do: "add", inputs, targets: new Int32Array(alone ? samples.length : 1).fill(label), group });
    }
  }

  #keep(label) {
    if (label >= this.names.length) {
      throw new DataError(`there is no class ${label}; press a digit from 0 to ${this.names.length - 1}`);
    }
    if (this.drawing.isEmpty) return void this.say("Draw something first.");
    const levels = this.drawing.image(this.shape);
    this.#add(levels, label);
    showImage($("draw-small"), levels, this.shape);
    $("draw-kept").hidden = false;
    put($("draw-kept-as"), this.names[label]);
    this.drawing.clear();
    this.say(`Kept as ${this.names[label]}.`);
  }

  /** Keep chosen pictures or sounds under the chosen class. */
  async #files(input) {
    const [files, label, kept, refused] = [[...input.files], this.label, [], []];
    const thing = mediumOf(this.federation.raw) ?? "picture";
    // Without this, the same file could not be chosen again.
    input.value = "";
    for (const [index, file] of files.entries()) {
      if (files.length > 1) this.say(`Reading ${thing} ${index + 1} of ${files.length}.`);
      try {
        kept.push(await chosenSample(this.federation, file));
      } catch (error) {
        if (!(error instanceof DataError)) throw error;
        refused.push(error.message);
      }
    }
    if (kept.length > 0) this.#give(kept, label);
    this.say(kept.length > 0 ? `${many(kept.length, thing)} kept as ${this.names[label]}.` : "");
    if (refused.length > 0) throw new DataError(refused.join("; "));
  }

  async #openCamera() {
    // The browser's own camera button stays if it refuses this one.
    $("picture-take").hidden = false;
    await this.camera.open();
    $("picture-take").hidden = true;
    $("camera").hidden = false;
    $("camera-shoot").focus();
  }

  async #shoot() {
    const { label } = this;
    this.#give([await photographed(this.federation, this.camera)], label);
    this.say(`Kept as ${this.names[label]}.`);
  }

  async #record() {
    if (this.microphone.isOn) return this.microphone.stop();
    const { label } = this;
    put($("sound-record"), "Stop");
    try {
      const sample = await recordedSample(this.federation, this.microphone, () => put($("sound-state"), "Recording"));
      if (sample === null) return;
      this.#give([sample], label);
      this.say(`Kept as ${this.names[label]}.`);
    } finally {
      put($("sound-record"), "Record");
      put($("sound-state"), "");
    }
  }

  #closeCamera() {
    this.camera.close();
    $("camera").hidden = true;
  }

  async #file(input) {
    const [file] = input.files;
    input.value = "";
    if (file) await this.#read(file.name, () => ({ do: "file", file }));
  }

  async #folder(input) {
    const files = Array.from(input.files, (file) => [file.webkitRelativePath || file.name, file]);
    input.value = "";
    if (!files.length) return;
    const progress = (done, total) => this.say(`Reading file ${done + 1} of ${total}.`);
    const read = () => readFolder(files, this.federation.raw, progress);
    await this.#read("the folder", async () => ({ do: "folder", read: await read() }));
  }

  /** Send the chosen files to the worker and show its notes. question(): the message to it, or a promise of it. */
  async #read(name, question) {
    this.say(`Reading ${name}.`);
    try {
      const { said } = await this.request(await question());
      this.say(`${said}.`);
    } catch (error) {
      this.say("");
      throw new DataError(error.message);
    }
  }

  async #forget() {
    const sure = await this.ask({
      question: "Delete these samples?",
      consequence: "They exist only in this browser and cannot be restored.",
      no: "Keep them", yes: "Delete them",
    });
    if (sure) this.send({ do: "clear" });
  }
}

/** Return the hint for a folder of samples. */
function folderHint({ raw }) {
  const medium = mediumOf(raw) ?? "picture";
  return `Choose a folder that has a folder of ${medium}s for each class, named after the class. It replaces your present ` +
    "samples.";
}

/** Return the hint for sounds: their length, and whether they can be recorded. */
function soundHint({ raw }, secure) {
  if (mediumOf(raw) !== "sound") return "";
  const most = raw.free.length ? "at most " : "", length = Number((raw.shape[0] / raw.rate).toFixed(2));
  const how = secure ? "press Record, make the sound, and press Stop." : "then the sounds. Recording in this page needs HTTPS.";
  return `Choose the class, ${how} A sound lasts ${most}${length} seconds.`;
}

/** What a file for a federation holds. */
function hintOf({ raw, columns, column, inputShape }) {
  const classes = `"${column ?? "label"}"`, last = "A file replaces your present samples.";
  if (columns.length) {
    return `A table (CSV) with the columns ${listed(columns.map(({ name }) => name))}, and ${classes} with the classes. ${last}`;
  }
  const { dtype, shape } = raw ?? { dtype: null, shape: inputShape };
  const one = `A sample has ${shape.join(" x ")} numbers${dtype ? ` (${dtype}), as they were recorded` : ""}.`;
  const arrays = "A .npz file with x and y, or x_train, y_train, x_test and y_test";
  return `${arrays}; or a table (CSV) with a column ${classes}. ${one} ${last}`;
}
