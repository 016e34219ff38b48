// One chart: a figure with a legend, a drawing (uPlot), and the same numbers as a table. The legend shows the newest
// values, or those under the pointer. Arrow keys move through the rounds while the drawing has the focus. A chart keeps
// its height, so that nothing below it moves.
// Dragging across the drawing zooms, a double click ends that.

const DASHES = [[], [8, 4], [2, 3], [10, 4, 2, 4], [1, 2], [14, 3]];
const HEIGHT = 220;
const all = new Set();

export class Chart {
  /** lines: [{label, value: point -> number or null}]; format: number -> text, with its unit; least: the scale's lower
      end, where it is not the smallest value; most: what no value exceeds; scale: what the charts of a place share. */
  constructor(place, title, lines, format, scale, { least, most = Infinity, height = HEIGHT } = {}) {
    Object.assign(this, { lines, format, shared: scale, least, most, height, points: [] });
    scale.charts.add(this);
    this.plot = element("div", { className: "plot", tabIndex: 0 });
    this.plot.setAttribute("role", "img");
    this.shownRound = element("span");
    this.legend = element("ul", { className: "lines" });
    this.none = element("p", { className: "none", textContent: "Not measured yet." });
    this.at = element("p", { className: "at unseen" });
    this.at.setAttribute("aria-live", "polite");
    this.rows = element("table");
    this.table = element("details", {}, [
      element("summary", { textContent: "As a table" }),
      element("div", { className: "wide", tabIndex: 0 }, [this.rows]),
    ]);
    this.figure = element("figure", { ariaLabel: title }, [
      element("figcaption", {}, [element("h3", { textContent: title }), this.shownRound]),
      this.legend, this.plot, this.none, this.at, this.table,
    ]);
    this.plot.hidden = this.table.hidden = true;
    this.title = title;
    place.append(this.figure);
    this.table.addEventListener("toggle", () => this.fill());
    this.plot.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.drawing?.setSize(this.size())).observe(this.plot);
    all.add(this);
  }

  /** Show these points, oldest first. */
  draw(points) {
    this.points = points;
    const shown = this.lines.filter((line) => points.some((point) => line.value(point) != null));
    this.plot.hidden = this.table.hidden = !shown.length;
    this.none.hidden = shown.length > 0;
    this.shown = shown;
    this.name();
    if (!shown.length) return;
    this.fill();
    if (!window.uPlot) return;
    const values = shown.map((line) => points.map((point) => line.value(point)));
    // A logarithm shows no zero; where a value is below it, the scale stays linear.
    this.log = this.shared.log && !values.flat().some((value) => value < 0);
    const drawn = this.log ? values.map((each) => each.map((value) => value || null)) : values;
    const data = [points.map((point) => point.round), ...drawn];
    const labels = [this.log, ...shown.map((line) => line.label)].join();
    if (this.drawing && this.labels === labels) {
      this.drawing.setData(data, !this.zoomed());
    } else {
      this.labels = labels;
      this.drawing?.destroy();
      this.drawing = new uPlot(this.options(), data, this.plot);
    }
    if (this.zoomed()) this.scale();
  }

  /** Draw everything anew, as with other colours or another scale. */
  again() {
    this.drawing?.destroy();
    this.drawing = this.labels = undefined;
    if (this.points.length) this.draw(this.points);
  }

  zoomed() {
    return this.shared.from != null || this.shared.to != null;
  }

  /** Show the rounds that the shared scale has. */
  scale() {
    if (!this.drawing || !this.points.length) return;
    const { from, to } = this.shared;
    const ends = [from ?? this.points[0].round, to ?? this.points.at(-1).round];
    // One point has no width of its own.
    const room = ends[0] === ends[1] ? 0.5 : 0;
    this.drawing.setScale("x", { min: ends[0] - room, max: ends[1] + room });
  }

  /** Name the lines, with their newest values or those of a point. */
  name(index) {
    const at = this.points[index];
    const labels = this.shown.map((line) => line.label).join();
    if (this.legend.dataset.of !== labels) {
      this.legend.dataset.of = labels;
      this.legend.replaceChildren(...this.shown.map((line) => {
        const mark = element("span", { className: `line line-${this.lines.indexOf(line) + 1}` });
        mark.setAttribute("aria-hidden", "true");
        return element("li", { title: line.label }, [mark, element("span", { textContent: line.label }), element("b")]);
      }));
    }
    const texts = this.shown.map((line) => {
      const value = line.value(at ?? this.points.findLast((each) => line.value(each) != null));
      return value == null ? "–" : this.format(value);
    });
    for (const [place, value] of this.legend.querySelectorAll("b").entries()) value.textContent = texts[place];
    this.shownRound.textContent = at ? `round ${at.round}` : "";
    if (at) return;
    const newest = this.shown.map((line, place) => `${line.label} ${texts[place]}`);
    this.plot.setAttribute("aria-label", `${this.title}. Newest: ${newest.join(", ")}`);
  }

  /** The scale of values between two: some room around them, but none where no value can be. */
  range(low, high) {
    if (this.log) return uPlot.rangeLog(low ?? 0.1, high ?? 1, 10, false);
    const [least, most] = uPlot.rangeNum(Math.min(low, this.least ?? low), high, 0.1, true);
    return [least, Math.min(most, this.most)];
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const text = (value) => (value == null ? "–" : this.format(value));
    const colours = { federation: colour("--accent"), device: colour("--bad") };
    const selected = (drawing) => {
      const { left, width } = drawing.select;
      if (width < 8) return;
      const [from, to] = [left, left + width].map((place) => drawing.posToVal(place, "x"));
      drawing.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      this.shared.zoom(from, to);
    };
    return {
      ...this.size(),
      scales: { x: { time: false }, y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.range(low, high) } },
      cursor: { drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { this.shared.zoom(null, null); } } },
      hooks: {
        setCursor: [({ cursor }) => this.name(cursor.idx)], setSelect: [selected],
        draw: [(drawing) => drawMarks(drawing, this.shared.marks, colours)],
      },
      legend: { show: false },
      axes: [
        { ...axis, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] },
        { ...axis, size: 74, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : text(tick))) },
      ],
      series: [
        {},
        ...this.shown.map((line) => {
          const index = this.lines.indexOf(line);
          const stroke = colour(`--data-${index + 1}`);
          return { stroke, width: 2, dash: DASHES[index], spanGaps: true, points: { size: 5 } };
        }),
      ],
    };
  }

  size() {
    return { width: Math.max(200, this.plot.clientWidth), height: this.height };
  }

  fill() {
    if (!this.table.open) return;
    const cells = (kind, texts) => element("tr", {}, texts.map((textContent) => element(kind, { textContent })));
    const names = ["round", ...this.shown.map((line) => line.label)];
    const rows = this.points.map((point) => {
      const round = point.first === point.round ? `${point.round}` : `${point.first} to ${point.round}`;
      return cells("td", [round, ...this.shown.map((line) => {
        const value = line.value(point);
        return value == null ? "–" : this.format(value);
      })]);
    });
    this.rows.replaceChildren(element("thead", {}, [cells("th", names)]), element("tbody", {}, rows));
  }

  step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.drawing) return;
    event.preventDefault();
    const last = this.points.length - 1;
    const now = this.index ?? last + (move > 0 ? -1 : 1);
    this.index = Math.min(last, Math.max(0, now + move));
    const point = this.points[this.index];
    this.drawing.setCursor({ left: this.drawing.valToPos(point.round, "x"), top: this.height / 3 });
    const values = this.shown.map((line) => [line.label, line.value(point)]).filter(([, value]) => value != null);
    const said = values.map(([label, value]) => `${label} ${this.format(value)}`).join(", ");
    this.at.textContent = [`Round ${point.round}: ${said || "not measured"}`, ...this.shared.saidAt(point)].join("; ");
  }
}

/** What the charts of one place share: the rounds that they show, a logarithmic scale, and the marks of events. */
export class Scale {
  /** Append the controls to an element. name: of the charts, for who cannot see where the controls are. */
  constructor(place, name) {
    Object.assign(this, { charts: new Set(), log: false, from: null, to: null, marks: [] });
    const number = (label) => element("input", { type: "number", min: 0, step: 1, ariaLabel: `${name}: ${label}` });
    [this.first, this.last] = [number("first round"), number("last round")];
    this.whole = element("button", { type: "button", textContent: "All rounds", disabled: true });
    const box = element("input", { type: "checkbox" });
    box.addEventListener("change", () => this.setLog(box.checked));
    for (const field of [this.first, this.last]) field.addEventListener("change", () => this.typed());
    this.whole.addEventListener("click", () => this.zoom(null, null));
    this.legend = element("span", { className: "marks-legend" }, [
      element("span", { className: "of--accent", textContent: "▾ " }), "event of the federation ",
      element("span", { className: "of--bad", textContent: "▴ " }), "failure of a device",
    ]);
    place.append(element("p", { className: "row scale" }, [
      element("label", {}, ["Rounds from", this.first]), element("label", {}, ["to", this.last]), this.whole,
      element("label", { className: "check" }, [box, "Logarithmic"]), this.legend,
    ]));
  }

  /** Show these rounds only; null for all of them. */
  zoom(from, to) {
    [this.from, this.to] = [from, to];
    this.first.value = from == null ? "" : Math.ceil(from);
    this.last.value = to == null ? "" : Math.floor(to);
    this.whole.disabled = from == null && to == null;
    for (const chart of this.charts) chart.scale();
  }

  typed() {
    const [from, to] = [this.first, this.last].map((field) => (field.value === "" ? null : Number(field.value)));
    if (from != null && to != null && from > to) return; // the other end is yet to be typed
    this.zoom(from, to);
  }

  setLog(log) {
    this.log = log;
    for (const chart of this.charts) chart.again();
  }

  /** marks: [{round, text, device}], where device is null for the federation itself. */
  mark(marks) {
    this.marks = marks;
    this.legend.dataset.marks = marks.length;
    for (const chart of this.charts) chart.drawing?.redraw(false);
  }

  /** What happened after the rounds before a point, up to its last. */
  saidAt(point) {
    const here = this.marks.filter(({ round }) => round >= point.first - 1 && round < point.round);
    const texts = here.slice(0, 3).map(({ device, text }) => (device ? `${device}: ${text}` : text));
    return here.length > 3 ? [...texts, `${here.length - 3} more events`] : texts;
  }
}

/** Draw the marks of events: a line and a triangle above for the federation, a triangle below for a device. */
function drawMarks(drawing, marks, colours) {
  const { ctx: pen, bbox: box } = drawing;
  const size = 4 * devicePixelRatio;
  const there = new Set();
  pen.save();
  for (const { round, device } of marks) {
    const x = Math.round(drawing.valToPos(round + 0.5, "x", true));
    const place = `${x} ${device == null}`;
    if (x < box.left || x > box.left + box.width || there.has(place)) continue;
    there.add(place);
    const [edge, tip] = device == null ? [box.top, box.top + 2 * size] : [box.top + box.height, box.top + box.height - 2 * size];
    pen.fillStyle = pen.strokeStyle = device == null ? colours.federation : colours.device;
    pen.beginPath();
    pen.moveTo(x - size, edge);
    pen.lineTo(x + size, edge);
    pen.lineTo(x, tip);
    pen.fill();
    if (device != null) continue;
    pen.setLineDash([size, size]);
    pen.beginPath();
    pen.moveTo(x, tip);
    pen.lineTo(x, box.top + box.height);
    pen.stroke();
  }
  pen.restore();
}

/** An element with properties and children. */
export function element(kind, { ariaLabel, ...properties } = {}, children = []) {
  const made = Object.assign(document.createElement(kind), properties);
  if (ariaLabel) made.setAttribute("aria-label", ariaLabel); // Firefox takes the property since 119 only
  made.append(...children);
  return made;
}

// Colours are drawn into the picture, so another scheme takes new ones.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of all) chart.again();
});
