// All devices at a glance: one cell each, in natural order of their names, coloured by what they are doing.

import { element } from "./charts.js";
import { DOING } from "./text.js";

const MOST_HEIGHT = 112; // px
const [LARGEST, SMALLEST] = [16, 2]; // sides of a cell, px
const LOOKS = {
  training: ["--accent"], evaluating: ["--accent", "half"], ready: ["--idle"], done: ["--idle"], resting: ["--warn", "half"],
  paused: ["--warn"], small_budget: ["--warn", "hollow"], not_selected: ["--warn", "half"], away: ["--bad", "half"], offline: ["--bad", "hollow"],
  stopped: ["--good", "half"], untrained: ["--bad"], not_joined: ["--bad"],
};
const FIRST = ["not_joined", "untrained", "offline", "away", "paused", "small_budget", "not_selected", "resting", "training", "evaluating", "ready", "stopped", "done"];

export class Strip {
  /** canvas: where it is drawn; legend: where its colours are named; chosen: told the name of a device that was clicked;
      asked: told a state whose devices are to be listed. */
  constructor(canvas, legend, chosen, asked) {
    Object.assign(this, { canvas, legend, asked, names: [], doing: [], seen: new Set() });
    canvas.addEventListener("click", (event) => {
      const index = this.at(event);
      if (this.names[index] !== undefined) chosen(this.names[index]);
    });
    canvas.addEventListener("pointermove", (event) => {
      const index = this.at(event);
      canvas.title = this.names[index] === undefined ? "" : `${this.names[index]}: ${DOING[this.doing[index]] ?? this.doing[index]}`;
    });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Show these devices: names, what each is doing, how many there are in all. */
  show({ names, doing, total }) {
    Object.assign(this, { names, doing, total });
    this.draw();
    this.name();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width || !this.names.length) return;
    let side = LARGEST;
    while (side > SMALLEST && Math.ceil(this.names.length / Math.floor(width / side)) * side > MOST_HEIGHT) side -= side > 6 ? 2 : 1;
    this.side = side;
    this.columns = Math.floor(width / side);
    const rows = Math.ceil(this.names.length / this.columns);
    const [scale, style] = [window.devicePixelRatio || 1, getComputedStyle(document.documentElement)];
    this.canvas.width = this.columns * side * scale;
    this.canvas.height = rows * side * scale;
    this.canvas.style.width = `${this.columns * side}px`; // the policy forbids style attributes, not properties
    this.canvas.style.height = `${rows * side}px`;
    const [brush, gap] = [this.canvas.getContext("2d"), side >= 8 ? 2 : side >= 4 ? 1 : 0];
    brush.scale(scale, scale);
    for (const [index, what] of this.doing.entries()) {
      const [colour, look] = LOOKS[what] ?? ["--idle"];
      brush.fillStyle = brush.strokeStyle = style.getPropertyValue(colour).trim();
      const [x, y, size] = [(index % this.columns) * side, Math.floor(index / this.columns) * side, side - gap];
      if (look && size >= 5) brush.strokeRect(x + 0.75, y + 0.75, size - 1.5, size - 1.5);
      if (!look || size < 5) brush.fillRect(x, y, size, size);
      else if (look === "half") brush.fillRect(x, y + size / 2, size, size / 2);
    }
  }

  name() {
    const counts = new Map();
    for (const what of this.doing) counts.set(what, (counts.get(what) ?? 0) + 1);
    for (const what of counts.keys()) this.seen.add(what);
    // A state keeps its place when no device is in it any more.
    const known = FIRST.filter((what) => this.seen.has(what));
    const words = known.map((what) => `${(counts.get(what) ?? 0).toLocaleString("en")} ${what.replace("_", " ")}`);
    this.canvas.setAttribute("aria-label", `A cell for each device: ${words.join(", ")}. The list of devices says the same.`);
    if (this.legend.dataset.of === words.join() && known.length) return; // or a button would lose the focus
    this.legend.dataset.of = words.join();
    const focused = document.activeElement?.dataset?.doing;
    const buttons = known.map((what, index) => {
      const [colour, look = "full"] = LOOKS[what];
      const mark = element("span", { className: `mark ${look} of${colour}` });
      mark.setAttribute("aria-hidden", "true");
      const button = element("button", { type: "button", className: "link", title: "List them" }, [mark, words[index]]);
      button.dataset.doing = what;
      button.addEventListener("click", () => this.asked(what));
      return button;
    });
    const left = this.total - this.names.length;
    this.legend.replaceChildren(...(known.length ? buttons : ["No device yet."]), ...(left > 0 ? [element("span", { textContent: `and ${left.toLocaleString("en")} more` })] : []));
    if (focused) this.legend.querySelector(`[data-doing="${focused}"]`)?.focus();
  }

  /** The place of the device under the pointer. */
  at({ offsetX, offsetY }) {
    const column = Math.floor(offsetX / this.side);
    return column < this.columns ? Math.floor(offsetY / this.side) * this.columns + column : -1;
  }
}
