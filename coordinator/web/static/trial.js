// "Try it": the predictions of this device's model for a drawing, a picture, a sound or a movement.

import { Drawing } from "./drawing.js";
import { Recorder } from "./motion.js";
import { givenShape, mediumOf } from "./raw.js";
import { chosenSample, recordedSample, sampleOf, waysOf } from "./give.js";
import { Microphone } from "./sounds.js";
import { $, classNames, element, percent, put, show } from "./words.js";

const SHOWN = 5; // classes in the list of scores
const HINTS = {
  draw: "Draw something; the model predicts its class when you lift the pen.",
  pictures: "Choose or take a picture; the model predicts its class.",
  sounds: "Choose or record a sound; the model predicts its class.",
  motion: "Move; the model predicts your activity.",
  row: "Fill in a row; the model predicts its class.",
  file: "",
};
const NOTHING = "There is no model yet. You get one with the first round in which this device takes part.";

/** Return class scores as shares of 1: a softmax, unless they are shares already. */
export function shares(scores) {
  const sum = scores.reduce((total, one) => total + one, 0);
  if (scores.every((one) => one >= 0) && Math.abs(sum - 1) < 1e-3) return [...scores];
  const largest = Math.max(...scores);
  const powers = Array.from(scores, (one) => Math.exp(one - largest));
  const all = powers.reduce((total, one) => total + one, 0);
  return powers.map((one) => one / all);
}

/** The section in which a user tries and downloads the model. */
export class Trial {
  /** @param {{ request: (message: object) => Promise<object> }} told sends a command to the worker, see page.js */
  constructor({ request }) {
    this.request = request;
    this.federation = null;
    this.names = []; // of the outputs
    this.newest = 0; // the last question: older answers are dropped
    const drawn = () => this.#attempt(() => this.#drawn());
    this.drawing = new Drawing($("trial-canvas"), { drawn, say: (text) => put($("trial-said"), text) });
    this.recorder = new Recorder({
      found: (values) => this.#attempt(() => this.#predict(values)),
      failed: (error) => this.#stop(error),
    });
    this.microphone = new Microphone();
    const press = (id, act) => $(id).addEventListener("click", () => this.#attempt(act));
    press("trial-clear", () => this.drawing.clear());
    press("trial-choose", () => $("trial-file").click());
    press("trial-take", () => $("trial-camera").click());
    press("trial-sound-choose", () => $("trial-sound").click());
    press("trial-sound-record", () => this.#record());
    press("trial-record", () => this.#watch());
    press("export", () => this.#export());
    $("trial-row").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#attempt(() => this.#row());
    });
    for (const id of ["trial-file", "trial-camera", "trial-sound"]) {
      $(id).addEventListener("change", () => this.#attempt(() => this.#chosen($(id))));
    }
  }

  /** Draw a state of the worker. */
  draw({ federation, samples, canPredict, phase }) {
    $("trial").hidden = federation === null || phase === "opening";
    if (federation === null) return;
    if (this.federation?.name !== federation.name) this.#fields(federation.columns);
    this.federation = federation;
    this.shape = givenShape(federation) ?? federation.inputShape;
    const { task, outputShape } = federation;
    this.names = classNames(task, outputShape.at(-1), samples.names ?? federation.names);
    const [first, ...others] = waysOf(federation), way = federation.columns.length ? "row" : first;
    this.drawing.setShape(this.shape);
    $("trial-draw").hidden = !canPredict || way !== "draw";
    $("trial-row").hidden = !canPredict || way !== "row";
    $("trial-pictures").hidden = !canPredict || ![first, ...others].includes("pictures");
    $("trial-sounds").hidden = !canPredict || way !== "sounds";
    $("trial-sound-record").hidden = !Microphone.isThere;
    $("trial-motion").hidden = !canPredict || way !== "motion";
    $("export").hidden = !canPredict;
    show($("trial-hint"), canPredict ? HINTS[way] : NOTHING);
    if (!canPredict) $("answer").hidden = true;
  }

  async #attempt(act) {
    show($("trial-problem"), "");
    try {
      await act();
    } catch (error) {
      show($("trial-problem"), error.message);
    }
  }

  async #drawn() {
    if (this.drawing.isEmpty) $("answer").hidden = true;
    else await this.#predict(this.drawing.image(this.shape));
  }

  async #chosen(input) {
    const [file] = input.files;
    input.value = "";
    if (file) await this.#ask(await chosenSample(this.federation, file));
  }

  async #record() {
    if (this.microphone.isOn) return this.microphone.stop();
    put($("trial-sound-record"), "Stop");
    try {
      const sample = await recordedSample(this.federation, this.microphone);
      if (sample !== null) await this.#ask(sample);
    } finally {
      put($("trial-sound-record"), "Record a sound");
    }
  }

  async #watch() {
    if (this.recorder.isRecording) return this.#stop(null);
    await this.recorder.allow();
    this.recorder.start();
    put($("trial-record"), "Stop watching");
  }

  #stop(error) {
    this.recorder.stop();
    put($("trial-record"), "Watch my movement");
    show($("trial-problem"), error?.message);
  }

  #predict(values) {
    return this.#ask(sampleOf(this.federation, values));
  }

  /** Show the model's prediction for a sample. */
  async #ask(sample) {
    const input = mediumOf(this.federation.raw) ? [sample] : sample;
    const question = (this.newest += 1);
    const { scores } = await this.request({ do: "predict", input });
    if (question === this.newest) this.#show(shares(scores), this.names);
  }

  /** Build a field for each column of a table. */
  #fields(columns) {
    $("trial-fields").replaceChildren(...columns.map(({ name, categories }, place) => {
      const id = `trial-${place}`, choices = ["", ...categories].map((each, index) => (
        element("option", { value: index - 1 }, each || "(another)")));
      const number = { id, type: "number", step: "any", required: true, inputmode: "decimal" };
      const field = categories.length ? element("select", { id }, ...choices) : element("input", number);
      return element("div", {}, element("label", { for: id }, name), field);
    }));
  }

  #row() {
    return this.#ask(Float32Array.from(this.federation.columns, (_, place) => Number($(`trial-${place}`).value)));
  }

  #show(parts, names) {
    const best = parts.map((share, label) => ({ share, name: names[label] })).sort((a, b) => b.share - a.share);
    put($("predicted"), `${best[0].name}, ${percent(best[0].share)} sure`);
    $("scores").classList.toggle("long", names.some((name) => name.length > 5));
    $("scores").replaceChildren(...best.slice(0, SHOWN).map(({ share, name }) => {
      const filled = element("span");
      filled.style.width = `${100 * share}%`;
      const bar = element("span", { class: "bar", "aria-hidden": "true" }, filled);
      return element("li", {}, element("span", {}, name), bar, element("span", { class: "number" }, percent(share)));
    }));
    $("answer").hidden = false;
  }

  async #export() {
    const { name, bytes } = await this.request({ do: "export" });
    const address = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
    element("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  }
}
