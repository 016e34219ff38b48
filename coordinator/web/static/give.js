// "Your data": samples drawn, photographed, recorded or read from a file, each with its class.

import { Drawing, showImage } from "./drawing.js";
import { Camera, readerOf } from "./pictures.js";
import { MotionPanel } from "./recording.js";
import { DataError } from "./errors.js";
import { givenShape, rawSample } from "./raw.js";
import { listed } from "./labels.js";
import { scaled } from "./samples.js";
import { $, classNames, element, many, put, show } from "./words.js";

const WAYS = { draw: "Draw", pictures: "Pictures", motion: "Motion", file: "File" };

/** The ways to give samples of a federation, the best one first: of "draw", "pictures", "motion" and "file". */
export function waysOf(federation) {
  const shape = givenShape(federation) ?? [];
  if (shape.length === 3 && shape[0] === 1) return ["draw", "pictures", "file"];
  if (shape.length === 3 && shape[0] === 3) return ["pictures", "file"];
  return shape.join() === "6,64" ? ["motion", "file"] : ["file"];
}

/** A drawing or picture in grey levels, or a record, as the federation's samples are: raw, or on its task's scale. */
export function sampleOf({ raw, task, inputShape }, values) {
  return raw ? rawSample(values, raw) : scaled(task, values, inputShape);
}

/** The section in which a person gives samples. */
export class Giving {
  /**
   * @param {object} told
   * @param {(message: object, transfer?: Transferable[]) => void} told.send to the worker
   * @param {(message: object) => Promise<object>} told.request asks the worker, see page.js
   * @param {(question: object) => Promise<boolean>} told.ask a question with two answers
   */
  constructor({ send, request, ask }) {
    this.send = send;
    this.request = request;
    this.ask = ask;
    this.federation = null;
    this.chips = {}; // way -> the buttons of its classes
    this.label = 0; // of the pictures that come next
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
    press("motion-record", () => this.motion.toggle());
    press("file-choose", () => $("file").click());
    press("samples-clear", () => this.#forget());
    const chosen = (id, act) => $(id).addEventListener("change", () => this.#attempt(() => act($(id))));
    chosen("picture-files", (input) => this.#pictures(input));
    chosen("picture-camera", (input) => this.#pictures(input));
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
    put($("file-classes"), names.map(([name, count]) => `${name}: ${count}`).join(", "));
    const { train, validation, test } = samples;
    put($("samples"), train + validation + test === 0
      ? "No samples yet"
      : `${many(train + validation + test, "sample")}: ${train} to train, ${validation} to check, ${test} to test`);
    put($("lacks"), samples.enough ? "That is enough to take part; more make the model better." : samples.lacks);
    show($("source"), samples.source === "files" ? samples.said : "");
    $("samples-clear").hidden = samples.source === "none" || train + validation + test === 0;
    put($("picture-hint"), secure ? "The middle square of each picture is used." :
      "The middle square of each picture is used. A live camera in this page needs HTTPS.");
  }

  /** Show why samples could not be taken: an Error, or a text. */
  fail(error) {
    show($("data-problem"), error instanceof Error ? error.message : error);
    if (error instanceof Error && !(error instanceof DataError)) console.error(error);
  }

  /** Say what was done, aloud too. */
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
    this.#choose("pictures", 0);
    this.#choose("motion", 0);
    [$("picture-live").hidden, $("picture-take").hidden] = [!Camera.isThere, Camera.isThere];
    put($("file-hint"), hintOf(federation));
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
    if (way === "pictures") this.label = label;
    else this.motion.choose(label);
  }

  /** Add a sample. group: that of one recording, whose samples are alike: all are trained on, or none. */
  #add(values, label, group) {
    this.send({ do: "add", inputs: sampleOf(this.federation, values), targets: Int32Array.of(label), group });
  }

  #keep(label) {
    if (label >= this.names.length) {
      throw new DataError(`there is no class ${label}: press a digit from 0 to ${this.names.length - 1}`);
    }
    if (this.drawing.isEmpty) return void this.say("Nothing is drawn yet.");
    const levels = this.drawing.image(this.shape);
    this.#add(levels, label);
    showImage($("draw-small"), levels, this.shape);
    $("draw-kept").hidden = false;
    put($("draw-kept-as"), this.names[label]);
    this.drawing.clear();
    this.say(`Kept as ${this.names[label]}.`);
  }

  async #pictures(input) {
    const [files, label, refused] = [[...input.files], this.label, []];
    input.value = ""; // so that the same file can be chosen again
    for (const [index, file] of files.entries()) {
      if (files.length > 1) this.say(`Reading picture ${index + 1} of ${files.length}.`);
      try {
        this.#add(await readerOf(this.federation.task).file(file, this.shape), label);
      } catch (error) {
        if (!(error instanceof DataError)) throw error;
        refused.push(error.message);
      }
    }
    const kept = files.length - refused.length;
    this.say(kept > 0 ? `${many(kept, "picture")} kept as ${this.names[label]}.` : "");
    if (refused.length > 0) throw new DataError(refused.join("; "));
  }

  async #openCamera() {
    $("picture-take").hidden = false; // the browser's own way stays where it refuses this one
    await this.camera.open();
    $("picture-take").hidden = true;
    $("camera").hidden = false;
    $("camera-shoot").focus();
  }

  #shoot() {
    this.#add(readerOf(this.federation.task).video($("camera-view"), this.shape), this.label);
    this.say(`Kept as ${this.names[this.label]}.`);
  }

  #closeCamera() {
    this.camera.close();
    $("camera").hidden = true;
  }

  async #file(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    this.say(`Reading ${file.name}.`);
    try {
      const { said } = await this.request({ do: "file", file });
      this.say(`${said}.`);
    } catch (error) {
      this.say("");
      throw new DataError(error.message);
    }
  }

  async #forget() {
    const sure = await this.ask({
      question: "Delete these samples?",
      consequence: "They exist only in this browser. They cannot be brought back.",
      no: "Keep them", yes: "Delete them",
    });
    if (sure) this.send({ do: "clear" });
  }
}

/** What a file for a federation holds. */
function hintOf({ raw, columns, column, inputShape }) {
  const classes = `"${column ?? "label"}"`, last = "A file replaces the samples that are here.";
  if (columns.length) {
    return `A table (CSV) with the columns ${listed(columns.map(({ name }) => name))}, and ${classes} with the classes. ${last}`;
  }
  const { dtype, shape } = raw ?? { dtype: null, shape: inputShape };
  const one = `One sample is ${shape.join(" x ")} numbers${dtype ? ` (${dtype}), as they were recorded` : ""}.`;
  const arrays = "A .npz file with x and y, or x_train, y_train, x_test and y_test";
  return `${arrays}; or a table (CSV) with a column ${classes}. ${one} ${last}`;
}
