// One chart: a figure with a legend, a drawing (uPlot), and the same numbers as a table. The legend shows the newest
// values, or those under the pointer. Arrow keys move through the rounds while the drawing has the focus. A chart keeps
// its height, so that nothing below it moves.

const DASHES = [[], [8, 4], [2, 3], [10, 4, 2, 4], [1, 2], [14, 3]];
const HEIGHT = 220;
const all = new Set();

export class Chart {
  /** lines: [{label, value: point -> number or null}]; format: number -> text, with its unit; least: the scale's lower
      end, where it is not the smallest value; most: what no value exceeds; height: of the drawing, px. */
  constructor(place, title, lines, format, least, most, height = HEIGHT) {
    Object.assign(this, { lines, format, least, most: most ?? Infinity, height, points: [] });
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
    const data = [points.map((point) => point.round), ...shown.map((line) => points.map((point) => line.value(point)))];
    const labels = shown.map((line) => line.label).join();
    if (this.drawing && this.labels === labels) {
      this.drawing.setData(data);
    } else {
      this.labels = labels;
      this.drawing?.destroy();
      this.drawing = new uPlot(this.options(), data, this.plot);
    }
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
    const [least, most] = uPlot.rangeNum(Math.min(low, this.least ?? low), high, 0.1, true);
    return [least, Math.min(most, this.most)];
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const text = (value) => (value == null ? "–" : this.format(value));
    return {
      ...this.size(),
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low, high) } },
      legend: { show: false },
      hooks: { setCursor: [({ cursor }) => this.name(cursor.idx)] },
      axes: [
        { ...axis, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] },
        { ...axis, size: 74, values: (_, ticks) => ticks.map(text) },
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
    this.at.textContent = `Round ${point.round}: ${said || "not measured"}`;
  }
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
  for (const chart of all) {
    chart.drawing?.destroy();
    chart.drawing = chart.labels = undefined;
    if (chart.points.length) chart.draw(chart.points);
  }
});
