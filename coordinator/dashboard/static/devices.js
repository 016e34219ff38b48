// Devices: the strip of all of them, and the list in pages.

import { call, fail, put } from "./calls.js";
import { element } from "./charts.js";
import { Strip } from "./strip.js";
import { ago, DOING, many, percent, points, refusedOf, seconds, tagsOf, whatOf, whyOf } from "./text.js";

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
  addEventListener("popstate", goTo);
  goTo();
  strip = new Strip($("strip"), $("legend"), openByName, (doing) => list({ doing }));
}

/** List those devices: of a search, of what they do, in an order. */
export function list({ search = "", doing = "", only = "", by = order }) {
  form.elements.search.value = search;
  form.elements.doing.value = doing;
  form.elements.only.value = only;
  form.elements.where.value = "";
  sort(by);
  $("devices-title").scrollIntoView({ block: "start" });
  $("devices-title").focus({ preventScroll: true });
}

export function pause() {
  clearTimeout(next);
}

/** Look at them again soon, as something has happened. */
export function refresh() {
  one?.refresh();
  $("where").hidden = !Object.keys(overview().federation.settings.tags).length;
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
    element("th", { scope: "row" }, [nameOf(device), ...(tagsOf(device) ? [element("p", { className: "tags", textContent: tagsOf(device) })] : [])]),
    cell("Board", [device.profile.board || "unknown"]),
    cell("Budget", [device.budget.toLocaleString("en", { maximumFractionDigits: 3 })], "number budget"),
    cell("Accuracy", shown(device.accuracy, percent), "number"),
    cell("Did it help?", shown(device.gain, (value) => points(value).replace(" ", "\u00a0")), "number"),
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

// --- the view of one, loaded when it is asked for --------------------------------------------------------------------

let one;

/** Show what the address names: a device, or the federation. */
async function goTo() {
  const id = new URLSearchParams(location.search).get("device");
  if (!id && !one) return;
  one ??= await import("./device.js").catch(() => null);
  if (one) one.goTo(api, overview, id);
  else fail("The coordinator did not answer: try again.");
}

function addressOf(id) {
  const query = new URLSearchParams(location.search);
  query.set("federation", decodeURIComponent(api.split("/").at(-1)));
  query.set("device", id);
  return `?${query}`;
}

function open(id) {
  history.pushState({ opened: true }, "", addressOf(id));
  goTo();
}

async function openByName(device) {
  const answer = await call("GET", `${api}/devices?${new URLSearchParams({ device, limit: 1 })}`, { where: "devices-problem" });
  const [found] = answer ? await answer.json() : [];
  if (found) open(found.device_id);
}

/** A click on a link to a device: here, unless its user wants another tab. */
function follow(event, id) {
  if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  open(id);
}

/** A device's name in a text, from which its view is opened. */
export function linkTo(name) {
  const made = element("button", { type: "button", className: "link", textContent: name });
  made.addEventListener("click", () => openByName(name));
  return made;
}

/** The name of a device, with which its own view is opened. */
function nameOf(device) {
  const link = element("a", { href: addressOf(device.device_id), textContent: device.name });
  link.dataset.focus = `device ${device.device_id}`;
  link.addEventListener("click", (event) => follow(event, device.device_id));
  return link;
}

// --- what its user does -----------------------------------------------------------------------------------------------

let typing;
form.addEventListener("input", (event) => {
  clearTimeout(typing);
  if (event.target.name === "order") sort(event.target.value);
  // An unfinished selection is an error.
  else if (event.target.name !== "where") typing = setTimeout(() => turn(-offset), 200);
});
form.elements.where.addEventListener("change", () => turn(-offset));
form.addEventListener("submit", (event) => event.preventDefault());
for (const head of $("devices").querySelectorAll("th[data-order]"))
  head.firstElementChild.addEventListener("click", () => {
    const { order: by, first = by } = head.dataset; // what one looks for first: the latest, the lowest
    sort(order === first ? (first.startsWith("-") ? by : `-${by}`) : first);
  });
$("previous").addEventListener("click", () => turn(-PAGE));
$("next").addEventListener("click", () => turn(PAGE));
