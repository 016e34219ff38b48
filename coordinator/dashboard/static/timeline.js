// The timeline: what happened to a federation, or to one of its devices, the newest first.

import { call } from "./calls.js";
import { element } from "./charts.js";
import { many } from "./text.js";

const PAGE = 10;
const MOST_MARKS = 300; // of the federation, and of failures
const NEWS_SECONDS = 5; // at most so often, where much happens
const KINDS = {
  "": "everything", "of=federation": "the federation itself", "of=devices": "devices", "kind=failed": "failures",
  "kind=failed&kind=recovered": "failures and their ends", "kind=paused&kind=resumed": "pauses",
  "kind=settings_changed&kind=rolled_back&kind=model_replaced": "changes by an operator",
};

export class Timeline {
  /** api: the path of the federation's calls; device: the name of one whose events are told, or null for all;
      linkTo: name -> an element for the name of a device. */
  constructor(place, api, { device = null, linkTo = (name) => name } = {}) {
    Object.assign(this, { api, device, linkTo, before: [], at: -Infinity });
    this.choice = element("select", {}, Object.entries(KINDS)
      .filter(([value]) => device == null || !/of=|settings/.test(value))
      .map(([value, textContent]) => element("option", { value, textContent })));
    this.list = element("ol", { className: "events" });
    this.none = element("p", { textContent: "No such event yet.", hidden: true });
    this.count = element("span");
    this.count.setAttribute("role", "status");
    [this.newer, this.older] = ["Newer", "Older"].map((textContent) => element("button", { type: "button", textContent }));
    this.links = ["csv", "json"].map((kind) => element("a", { textContent: `Events (${kind.toUpperCase()})` }));
    place.replaceChildren(
      element("p", { className: "row" }, [element("label", {}, ["Show ", this.choice])]), this.list, this.none,
      element("p", { className: "row" }, [this.count, this.newer, this.older, ...this.links]),
    );
    // Most who look at a page do not scroll to it.
    new IntersectionObserver(([entry]) => {
      this.seen = entry.isIntersecting;
      if (this.seen && this.waits) this.news();
    }).observe(place);
    this.waits = true;
    this.choice.addEventListener("change", () => this.turn([]));
    this.newer.addEventListener("click", () => this.turn(this.before.slice(0, -1)));
    this.older.addEventListener("click", () => this.turn([...this.before, this.oldest]));
  }

  /** Show another page. before: the ids at which this page and the newer ones begin. */
  turn(before) {
    this.before = before;
    return this.look();
  }

  query(more = {}) {
    const query = new URLSearchParams(this.choice.value);
    if (this.device != null) query.set("device", this.device);
    for (const [key, value] of Object.entries(more)) query.set(key, value);
    return `${this.api}/timeline?${query}`;
  }

  /** Something happened: look soon, unless its user reads older events. */
  news() {
    clearTimeout(this.next);
    this.waits = true;
    if (this.before.length || !this.seen) return;
    this.next = setTimeout(() => this.look(), Math.max(0, this.at + NEWS_SECONDS * 1000 - performance.now()));
  }

  async look() {
    clearTimeout(this.next);
    this.waits = false;
    this.at = performance.now();
    const start = this.before.at(-1);
    const answer = await call("GET", this.query({ limit: PAGE, ...(start && { before: start }) }));
    if (!answer || start !== this.before.at(-1)) return;
    const { events, total } = await answer.json();
    this.oldest = events.at(-1)?.id;
    this.list.replaceChildren(...events.map((event) => this.line(event)));
    this.none.hidden = events.length > 0;
    this.count.textContent = many(total, "event");
    this.newer.disabled = !this.before.length;
    this.older.disabled = events.length < PAGE;
    for (const [index, kind] of ["csv", "json"].entries())
      Object.assign(this.links[index], { href: this.query({ format: kind }), download: `events.${kind}` });
  }

  line({ at, round, device, text, kind }) {
    const time = element("time", { dateTime: at, textContent: new Date(at).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }) });
    const who = device == null || this.device != null ? [] : [this.linkTo(device), " "];
    return element("li", { className: kind }, [time, element("span", { textContent: `round ${round}` }), element("span", {}, [...who, text])]);
  }
}

/** Events as marks of charts, read once and then followed. */
export class Marks {
  constructor(api, show, device = null) {
    Object.assign(this, { api, show, device, known: new Map(), read: 0, newest: 0, at: -Infinity });
  }

  /** newest: the id of the newest event. */
  follow(newest) {
    if (newest <= this.newest) return;
    this.newest = newest;
    clearTimeout(this.next);
    this.next = setTimeout(() => this.look(), Math.max(0, this.at + NEWS_SECONDS * 1000 - performance.now()));
  }

  async look() {
    this.at = performance.now();
    const query = this.device != null
      ? { device: this.device, limit: MOST_MARKS }
      : { of: "marked", limit: MOST_MARKS, ...(this.read && { after: this.read }) };
    this.read = this.newest;
    const answer = await fetch(`${this.api}/timeline?${new URLSearchParams(query)}`).catch(() => null);
    for (const event of answer?.ok ? (await answer.json()).events : []) this.known.set(event.id, event);
    // In a device's own charts its events are the main ones.
    const main = (event) => (this.device == null || event.kind === "failed" ? event : { ...event, device: null });
    this.show([...this.known.values()].sort((one, other) => one.id - other.id).map(main));
  }
}
