// Devices: the strip of all of them, the list in pages, and what one of them did.

import { call, put } from "./calls.js";
import { Chart, element } from "./charts.js";
import { Strip } from "./strip.js";
import { ago, bytes, DOING, joules, many, percent, plain, points, refusedOf, seconds, whatOf, whyOf } from "./text.js";

const PAGE = 50;
const DEVICES_SECONDS = 5; // at most so often, where something happens
const IDLE_SECONDS = 30; // where nothing does: when a device was last seen changes all the same
const $ = (id) => document.getElementById(id);
const form = $("find");

let api;
let overview; // () => the newest
let sure; // asks before something is done for good
let order = "name";
let offset = 0;
let at = -Infinity;
let next;
let asked;
let strip;

/** Begin. of: the path of the federation's calls; newest: returns the newest overview; confirm: asks its user. */
export function begin(of, newest, confirm) {
  [api, overview, sure] = [of, newest, confirm];
  strip = new Strip($("strip"), $("legend"), (name) => open({ device: name }), (doing) => list({ doing }));
}

/** List those devices: of a search, of what they do, in an order. */
export function list({ search = "", doing = "", only = "", by = order }) {
  form.elements.search.value = search;
  form.elements.doing.value = doing;
  form.elements.only.value = only;
  sort(by);
  $("devices-title").scrollIntoView({ block: "start" });
  $("devices-title").focus({ preventScroll: true });
}

export function pause() {
  clearTimeout(next);
}

/** Look at them again soon, as something has happened. */
export function refresh() {
  for (const [value, text] of Object.entries(DOING)) {
    const known = [...form.elements.doing.options].find((option) => option.value === value);
    const option = known ?? form.elements.doing.appendChild(element("option", { value }));
    option.textContent = `${text} (${overview().doing[value] ?? 0})`;
  }
  clearTimeout(next);
  next = setTimeout(look, Math.max(0, at + DEVICES_SECONDS * 1000 - performance.now()));
}

/** Look at all of them, and at the page of the list. */
async function look() {
  at = performance.now();
  clearTimeout(next);
  next = setTimeout(look, IDLE_SECONDS * 1000);
  await Promise.all([showAll(), show()]);
}

async function showAll() {
  const states = await call("GET", `${api}/devices/states`, { where: "devices-problem" });
  if (states) strip.show(await states.json());
}

async function show() {
  const wanted = new URLSearchParams({ limit: PAGE, offset, order });
  for (const [key, value] of new FormData(form)) if (value && key !== "order") wanted.set(key, value);
  const mine = (asked = wanted.toString());
  const answer = await call("GET", `${api}/devices?${wanted}`, { where: "devices-problem" });
  if (!answer || mine !== asked || document.querySelector("dialog[open]")) return; // whose button is to have the focus again
  const devices = await answer.json();
  const total = Number(answer.headers.get("Sparrow-Total"));
  if (!devices.length && offset) return turn(-offset);
  const body = $("devices").tBodies[0];
  const focused = document.activeElement?.dataset?.focus;
  body.replaceChildren(...devices.map(rowOf));
  if (focused) body.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  $("devices").querySelector("th.actions").hidden = !overview()?.may_change;
  put("count", total ? `${offset + 1} to ${offset + devices.length} of ${many(total, "device")}` : overview()?.federation.devices ? "No such device." : "No device yet.");
  $("previous").disabled = !offset;
  $("next").disabled = offset + devices.length >= total;
}

function turn(by) {
  offset = Math.max(0, offset + by);
  return show();
}

function sort(by) {
  order = form.elements.order.value = by;
  for (const head of $("devices").querySelectorAll("th[data-order]")) {
    const mine = order.replace("-", "") === head.dataset.order;
    if (mine) head.setAttribute("aria-sort", order.startsWith("-") ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  return turn(-offset);
}

/** The cells of a row; each has its column's name, which narrow screens show beside it. */
function rowOf(device) {
  const cell = (label, children, className = "") => {
    const made = element("td", { className }, [element("span", {}, children)]);
    made.dataset.label = label;
    return made;
  };
  const shown = (value, text) => [value == null ? "–" : text(value)];
  const cells = [
    element("th", { scope: "row" }, [nameOf(device)]),
    cell("Board", [device.profile.board || "unknown"]),
    cell("Budget", [device.budget.toLocaleString("en", { maximumFractionDigits: 3 })], "number budget"),
    cell("Accuracy", shown(device.accuracy, percent), "number"),
    cell("Did it help?", shown(device.gain, points), "number"),
    cell("Time", shown(device.seconds, seconds), "number"),
    cell("Doing", [
      whatOf(device, overview()?.smallest_budget),
      ...(device.failure ? [element("p", { className: "failure", textContent: whyOf(device) })] : []),
      ...(device.refusals > 1 ? [element("p", { className: "failure", textContent: refusedOf(device) })] : []),
      ...(device.exported ? [element("p", { textContent: "exported its model" })] : []),
      ...device.profile.data_warnings.map((text) => element("p", { className: "failure", textContent: `data: ${text}` })),
    ]),
    cell("Last seen", [element("time", { dateTime: device.seen_at, textContent: ago(device.seen_at) })]),
  ];
  if (overview()?.may_change) {
    cells.push(cell("Revoke", [device.doing === "revoked" ? removing(device) : revoking(device)]));
  }
  return element("tr", {}, cells);
}

function revoking({ device_id: id, name }) {
  const button = element("button", { type: "button", className: "danger", textContent: "Revoke", ariaLabel: `Revoke ${name}` });
  button.dataset.focus = `revoke ${id}`;
  button.addEventListener("click", async () => {
    if (!(await sure(`Take ${name}'s token away for good? It can then do nothing here any more.`, "Revoke"))) return;
    if (await call("PATCH", `v1/devices/${id}`, { body: { revoked: true }, where: "devices-problem" })) await look();
  });
  return button;
}

function removing({ device_id: id, name }) {
  const button = element("button", { type: "button", className: "danger", textContent: "Remove", ariaLabel: `Remove ${name}` });
  button.dataset.focus = `revoke ${id}`;
  button.addEventListener("click", async () => {
    if (!(await sure(`Remove ${name} from lists and counts? Records of rounds keep it.`, "Remove"))) return;
    if (await call("DELETE", `v1/devices/${id}`, { where: "devices-problem" })) await look();
  });
  return button;
}

/** The name of a device, with which its history is opened. */
function nameOf(device) {
  const button = element("button", { type: "button", className: "link", textContent: device.name, ariaHasPopup: "dialog" });
  button.dataset.focus = `history ${device.device_id}`;
  button.addEventListener("click", () => history(device.device_id));
  return button;
}

// --- one device -------------------------------------------------------------------------------------------------------

/** Open the history of the device of this name. */
async function open({ device }) {
  const answer = await call("GET", `${api}/devices?${new URLSearchParams({ device, limit: 1 })}`, { where: "devices-problem" });
  const [found] = answer ? await answer.json() : [];
  if (found) await history(found.device_id);
}

let charts;

async function history(id) {
  const answer = await call("GET", `v1/devices/${id}?most=200`, { where: "devices-problem" });
  if (!answer) return;
  const { device, work } = await answer.json();
  const shown = (value, text) => (value == null ? "–" : text(value));
  const cell = (label, textContent) => {
    const made = element("td", { textContent });
    made.dataset.label = label;
    return made;
  };
  const rows = work.map((each) => element("tr", {}, [
    element("th", { scope: "row", textContent: `Round ${each.round}` }),
    cell("Work", each.kind), cell("Outcome", each.reason ? `${each.status}: ${each.reason}` : each.status),
    cell("Loss", shown(each.loss, plain)), cell("Accuracy", shown(each.accuracy ?? each.accuracy_global, percent)),
    cell("Time", shown(each.seconds, seconds)), cell("Up", shown(each.bytes_up, bytes)), cell("Down", shown(each.bytes_down, bytes)),
    cell("Energy", shown(each.joules, joules)),
  ]));
  $("history-title").textContent = device.name;
  $("history-about").replaceChildren(...Object.entries({
    Doing: whatOf(device, overview()?.smallest_budget),
    Board: [device.profile.board, device.profile.system].filter(Boolean).join(", ") || "unknown",
    Hardware: [many(device.profile.cores, "core"), device.profile.memory_bytes && bytes(device.profile.memory_bytes)].filter(Boolean).join(", "),
    ...(device.profile.data_warnings.length ? { Data: device.profile.data_warnings.join("; ") } : {}),
    Budget: `${plain(device.budget)}${device.limited_by ? `, limited by ${device.limited_by}` : ""}`,
    "In all": `${bytes(device.everything.bytes_up)} up, ${bytes(device.everything.bytes_down)} down`,
    "Last seen": ago(device.seen_at),
    ...(device.refusals > 0 ? { Refused: refusedOf(device) } : {}),
    Exported: device.exported ? "yes, and not trained since" : "no",
  }).map(([term, text]) => element("div", {}, [element("dt", { textContent: term }), element("dd", { textContent: text })])));
  $("history-failure").hidden = !device.failure;
  $("history-failure").textContent = device.failure ? whyOf(device) : "";
  $("history-work").tBodies[0].replaceChildren(...rows);
  $("history-table").hidden = !rows.length;
  $("history-none").hidden = rows.length > 0;
  $("history").showModal();
  charts ??= [
    ["Accuracy of this device", percent, [["personal", (p) => p.accuracy], ["global", (p) => p.accuracy_global]], undefined, 1],
    ["Loss of this device", plain, [["training", (p) => p.train_loss], ["evaluation", (p) => p.judged_loss]]],
    ["Seconds of this device", seconds, [["seconds", (p) => p.seconds]], 0],
    ["Bytes of this device", bytes, [["up", (p) => p.bytes_up], ["down", (p) => p.bytes_down]], 0],
    ["Joules of this device", joules, [["joules", (p) => p.joules]], 0],
  ].map(([title, format, lines, least, most]) =>
    new Chart($("history-charts"), title, lines.map(([label, value]) => ({ label, value })), format, least, most, 150));
  const rounds = byRound(work);
  for (const chart of charts) chart.draw(rounds);
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

// --- what its user does -----------------------------------------------------------------------------------------------

let typing;
form.addEventListener("input", (event) => {
  clearTimeout(typing);
  if (event.target.name === "order") sort(event.target.value);
  else typing = setTimeout(() => turn(-offset), 200);
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const head of $("devices").querySelectorAll("th[data-order]"))
  head.firstElementChild.addEventListener("click", () => {
    const { order: by, first = by } = head.dataset; // what one looks for first: the latest, the lowest
    sort(order === first ? (first.startsWith("-") ? by : `-${by}`) : first);
  });
$("previous").addEventListener("click", () => turn(-PAGE));
$("next").addEventListener("click", () => turn(PAGE));
