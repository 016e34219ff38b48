// One device, at an address of its own: what it is, all its work in charts and a table, and its events. Loaded when needed.

import { call, put } from "./calls.js";
import { Chart, element, Scale } from "./charts.js";
import { ago, bytes, joules, many, percent, plain, points, refusedOf, seconds, tagsOf, whatOf, whyOf } from "./text.js";
import { Marks, Timeline } from "./timeline.js";

const LOOK_SECONDS = 5; // at most so often, where something happens
const ALL = 10_000; // the most pieces of work in one answer
const NEWS = 20;
const ROWS = 200; // of the table, before its user asks for all
const $ = (id) => document.getElementById(id);

let api; // of the federation's calls
let overview; // () => the newest
let shown = null; // { id, name, work, timeline, marks, at, next }
let charts;
let scale;
let before; // what had the focus

/** Show a device, or the federation again. of: the path of the federation's calls; newest: returns the newest overview. */
export function goTo(of, newest, id) {
  [api, overview] = [of, newest];
  if (id === (shown?.id ?? null)) return;
  const focused = document.activeElement?.dataset?.focus;
  clearTimeout(shown?.next);
  shown = null;
  document.body.classList.toggle("one-device", Boolean(id));
  $("device-view").hidden = !id;
  if (id) {
    before = focused;
    show(id);
  } else if (before) document.querySelector(`[data-focus="${CSS.escape(before)}"]`)?.focus();
}

/** Something happened. */
export function refresh() {
  if (!shown?.work) return;
  document.title = titleOf(shown.name);
  shown.marks.follow(overview().newest_event);
  shown.timeline.news();
  clearTimeout(shown.next);
  shown.next = setTimeout(look, Math.max(0, shown.at + LOOK_SECONDS * 1000 - performance.now()));
}

const titleOf = (name) => `${name} in ${overview()?.federation.name ?? "a federation"} – Sparrow`;

async function show(id) {
  const mine = (shown = { id, at: performance.now() });
  $("device-name").textContent = "…";
  const answer = await call("GET", `v1/devices/${encodeURIComponent(id)}?most=${ALL}`, { where: "device-problem" });
  if (mine !== shown) return;
  for (const part of $("device-view").querySelectorAll(".of-device")) part.hidden = !answer;
  if (!answer) return put("device-name", "No such device");
  const { device, work } = await answer.json();
  scale ??= new Scale($("device-scale"), "Charts of this device");
  scale.zoom(null, null);
  scale.mark([]);
  Object.assign(shown, {
    name: device.name, work: new Map(),
    timeline: new Timeline($("device-events"), api, { device: device.name }),
    marks: new Marks(api, (marks) => mine === shown && scale.mark(marks), device.name),
  });
  take(device, work);
  $("device-name").focus({ preventScroll: true });
  scrollTo(0, 0);
  if (overview()) refresh();
}

async function look() {
  const mine = shown;
  mine.at = performance.now();
  const answer = await call("GET", `v1/devices/${encodeURIComponent(mine.id)}?most=${NEWS}`);
  if (!answer || mine !== shown) return;
  const { device, work } = await answer.json();
  // What was missed meanwhile, as in a page that was in the background, is read whole.
  if (work.length === NEWS && !shown.work.has(keyOf(work.at(-1)))) return show(mine.id);
  take(device, work);
}

const keyOf = (each) => `${each.round} ${each.kind} ${each.began_at}`;

/** Show the device, with this work beside that which is known. */
function take(device, work) {
  for (const each of work) shown.work.set(keyOf(each), each);
  const all = [...shown.work.values()].sort((one, other) => (one.began_at < other.began_at ? 1 : one.began_at > other.began_at ? -1 : other.round - one.round));
  document.title = titleOf(device.name);
  $("device-name").textContent = device.name;
  $("device-back").href = `?${new URLSearchParams({ federation: decodeURIComponent(api.split("/").at(-1)) })}`;
  $("device-about").replaceChildren(...Object.entries({
    Doing: whatOf(device, overview()?.smallest_budget),
    Board: [device.profile.board, device.profile.system].filter(Boolean).join(", ") || "unknown",
    Hardware: [many(device.profile.cores, "core"), device.profile.memory_bytes && bytes(device.profile.memory_bytes)].filter(Boolean).join(", "),
    ...(device.profile.data_warnings.length ? { Data: device.profile.data_warnings.join("; ") } : {}),
    ...(tagsOf(device) ? { Tags: tagsOf(device) } : {}),
    Budget: `${plain(device.budget)}${device.limited_by ? `, limited by ${device.limited_by}` : ""}`,
    ...(device.gain == null ? {} : { "Did it help?": `${points(device.gain)} against training alone (${percent(device.accuracy_alone)})` }),
    "In all": `${bytes(device.everything.bytes_up)} up, ${bytes(device.everything.bytes_down)} down`,
    "Last seen": ago(device.seen_at),
    ...(device.refusals > 0 ? { Refused: refusedOf(device) } : {}),
    Exported: device.exported ? "yes, and not trained since" : "no",
    Joined: new Date(device.enrolled_at).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }),
  }).map(([term, text]) => element("div", {}, [element("dt", { textContent: term }), element("dd", { textContent: text })])));
  $("device-failure").hidden = !device.failure;
  $("device-failure").textContent = device.failure ? whyOf(device) : "";
  for (const kind of ["csv", "json"])
    Object.assign($(`device-${kind}`), { href: `v1/devices/${device.device_id}?most=${ALL}&format=${kind}`, download: `${device.name}.${kind}` });
  fill(all);
  const rounds = byRound(all);
  $("device-charts-place").hidden = !rounds.length;
  charts ??= [
    ["Accuracy of this device", percent, [["personal", (p) => p.accuracy], ["global", (p) => p.accuracy_global]], { most: 1 }],
    ["Loss of this device", plain, [["training", (p) => p.train_loss], ["evaluation", (p) => p.judged_loss]]],
    ["Seconds of this device", seconds, [["seconds", (p) => p.seconds]], { least: 0 }],
    ["Bytes of this device", bytes, [["up", (p) => p.bytes_up], ["down", (p) => p.bytes_down]], { least: 0 }],
    ["Joules of this device", joules, [["joules", (p) => p.joules]], { least: 0 }],
  ].map(([title, format, lines, ends]) =>
    new Chart($("device-charts"), title, lines.map(([label, value]) => ({ label, value })), format, scale, ends));
  for (const chart of charts) chart.draw(rounds);
}

/** The table of its work; a long one only in part, until its user wants the rest. */
function fill(all) {
  const texts = (value, text) => (value == null ? "–" : text(value));
  const cell = (label, textContent) => {
    const made = element("td", { textContent });
    made.dataset.label = label;
    return made;
  };
  const rows = all.slice(0, shown.whole ? all.length : ROWS).map((each) => element("tr", {}, [
    element("th", { scope: "row", textContent: `Round ${each.round}` }),
    cell("Work", each.kind), cell("Outcome", each.reason ? `${each.status}: ${each.reason}` : each.status),
    cell("Loss", texts(each.loss, plain)), cell("Accuracy", texts(each.accuracy ?? each.accuracy_global, percent)),
    cell("Time", texts(each.seconds, seconds)), cell("Up", texts(each.bytes_up, bytes)), cell("Down", texts(each.bytes_down, bytes)),
    cell("Energy", texts(each.joules, joules)),
  ]));
  $("device-work").tBodies[0].replaceChildren(...rows);
  $("device-table").hidden = !rows.length;
  $("device-none").hidden = rows.length > 0;
  $("device-more").hidden = rows.length === all.length;
  $("device-more").textContent = `Show all ${all.length.toLocaleString("en")}`;
  $("device-more").onclick = () => {
    shown.whole = true;
    fill(all);
  };
}

/** The work of each round as one point of a chart, the oldest first. */
function byRound(work) {
  const points = new Map();
  for (const each of [...work].reverse()) {
    const point = points.get(each.round) ?? { first: each.round, round: each.round };
    const judged = each.kind === "evaluate" || each.kind === "adapt";
    for (const name of ["accuracy", "accuracy_global"]) point[name] = each[name] ?? point[name];
    point[judged ? "judged_loss" : "train_loss"] = each.loss ?? point[judged ? "judged_loss" : "train_loss"];
    for (const name of ["seconds", "bytes_up", "bytes_down", "joules"]) if (each[name] != null) point[name] = (point[name] ?? 0) + each[name];
    points.set(each.round, point);
  }
  return [...points.values()].sort((one, other) => one.round - other.round);
}

$("device-back").addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  if (history.state?.opened) return history.back();
  history.replaceState(null, "", event.currentTarget.href);
  goTo(api, overview, null);
});
