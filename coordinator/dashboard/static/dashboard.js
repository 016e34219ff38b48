// The page: one stream of events says how a federation stands; devices come in pages; changes are PATCH calls.

import { Chart, element } from "./charts.js";

const PAGE = 50;
const DEVICES_SECONDS = 5; // at most so often, where something happens
const IDLE_SECONDS = 30; // where nothing does: when a device was last seen changes all the same
const [RETRY_SECONDS, LONGEST_RETRY_SECONDS] = [3, 60];
const $ = (id) => document.getElementById(id);
const name = new URLSearchParams(location.search).get("federation") || document.documentElement.dataset.federation;
const api = `v1/federations/${encodeURIComponent(name)}`;

// --- words and numbers ----------------------------------------------------------------------------------------------

const DOING = {
  training: "training", evaluating: "evaluating", ready: "ready, not drawn", resting: "resting: handed its work back",
  paused: "paused by its policy", away: "away: missed a deadline, fell silent or left", small_budget: "budget too small",
  stopped: "stopped early", revoked: "revoked", done: "done: the federation has ended", offline: "offline",
};
const PAUSED = {
  charging: "not charging", battery: "battery low", heat: "too hot", throttled: "throttled", power: "power low",
  network: "network metered", load: "busy", memory: "memory short", storage: "storage short", hours: "outside its hours",
  energy: "energy spent",
};
const REASONS = { all_stopped: "every device stopped", max_rounds: "all rounds done", operator: "stopped by an operator" };

const SPACE = "\u00a0"; // a number stays with its unit

function scaled(value, units, step) {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) [value, unit] = [value / step, unit + 1];
  const digits = value === 0 || Math.abs(value) >= 100 || (unit === 0 && Number.isInteger(value)) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${Number(value.toFixed(digits))}${SPACE}${units[unit]}`;
}
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
const joules = (value) => scaled(value, ["J", "kJ", "MJ", "GJ"], 1000);
const percent = (value) => `${(100 * value).toFixed(1)}${SPACE}%`;
const plain = (value) => String(Number(value.toPrecision(3)));
const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

function seconds(value) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => value >= 2 * size) ?? [1, "s"];
  return `${Number((value / size).toFixed(size > 1 ? 1 : value < 10 ? 2 : 0))}${SPACE}${unit}`;
}

/** Set an element's text where it is another: what is read out to a user is read out at each change. */
function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function since(iso) {
  return Math.max(0, (Date.now() + skew - Date.parse(iso)) / 1000);
}

function ago(iso) {
  const past = since(iso);
  return past < 60 ? "less than a minute ago" : `${seconds(past)} ago`;
}

// --- charts ---------------------------------------------------------------------------------------------------------

const per = (of) => (point) => of(point) / (point.round - point.first + 1);
const nonzero = (of) => (point) => of(point) || null;
const CHARTS = [
  ["Accuracy", percent, [
    ["personal mean", (p) => p.accuracy_personal],
    ["bottom decile", (p) => p.accuracy_personal_decile],
    ["global", (p) => p.accuracy_global],
  ], undefined, 1],
  ["Loss", plain, [
    ["personal", (p) => p.loss_personal], ["global", (p) => p.loss_global], ["training", (p) => p.train_loss],
  ]],
  ["Bytes a round", bytes, [
    ["up", per((p) => p.bytes_up)], ["down", per((p) => p.bytes_down)], ["whole model both ways", per((p) => p.whole_bytes)],
  ], 0],
  ["Joules a round", joules, [
    ["measured", nonzero(per((p) => p.joules_measured))], ["estimated", nonzero(per((p) => p.joules_estimated))],
  ], 0],
  ["Seconds a round, over devices", seconds, [
    ["training", per((p) => p.train_seconds)], ["download", per((p) => p.download_seconds)],
    ["upload", per((p) => p.upload_seconds)], ["evaluation", per((p) => p.evaluation_seconds)],
  ], 0],
].map(([title, format, lines, least, most]) =>
  new Chart($("charts"), title, lines.map(([label, value]) => ({ label, value })), format, least, most));

// --- how it stands --------------------------------------------------------------------------------------------------

let overview;
let points = new Map();
let skew = 0; // the coordinator's clock less ours, ms

function show(news) {
  if (!overview || overview.span !== news.span || fresh) points = new Map();
  fresh = false;
  overview = news;
  skew = Date.parse(news.at) - Date.now();
  for (const point of news.points) points.set(point.first, point);
  const rounds = [...points.values()].sort((one, other) => one.round - other.round);
  const { federation } = news;
  document.title = `${federation.name}: ${federation.status}, round ${federation.round} – Sparrow`;
  $("name").textContent = federation.name;
  $("status").textContent = $("status").className = federation.status;
  $("status").classList.add("badge");
  put("state", stateOf(federation));
  $("invite").hidden = !federation.device_kinds.includes("page");
  showFederations(news);
  $("tiles").replaceChildren(...tilesOf(news, rounds).map(([term, value, more]) => element("div", {}, [
    element("dt", { textContent: term }),
    element("dd", { textContent: value }, more ? [element("small", { textContent: more })] : []),
  ])));
  $("warnings").hidden = !news.notices.length;
  $("notices").replaceChildren(...news.notices.map(({ text }) => element("li", { textContent: text })));
  $("no-rounds").hidden = rounds.length > 0;
  if (rounds.length) for (const chart of CHARTS) chart.draw(rounds);
  showRunning();
  showAdmin(federation);
  showDownloads(federation);
  showKinds();
  refreshDevices();
}

function showFederations({ federation, federations }) {
  const known = federations.some((line) => line.name === name) ? federations : [federation, ...federations];
  const texts = known.map((line) => `${line.name} (${line.status})`);
  const select = $("federation");
  if (select.dataset.of === texts.join()) return; // or it would close while its user chooses
  select.dataset.of = texts.join();
  select.replaceChildren(...known.map((line, index) =>
    element("option", { value: line.name, selected: line.name === name, textContent: texts[index] })));
}

function stateOf(federation) {
  const parts = [];
  if (federation.reason) parts.push(`ended: ${REASONS[federation.reason] ?? federation.reason}`);
  if (federation.status === "waiting") parts.push(`begins when ${many(federation.settings.min_devices, "device")} have enrolled`);
  if (federation.waiting_for) parts.push(`waiting for ${federation.waiting_for}`);
  if (federation.rollback_version != null) parts.push(`goes back to model ${federation.rollback_version} when this round has closed`);
  if (federation.replacing) parts.push("takes a new version of its model when this round has closed");
  if (!federation.global_model_usable) parts.push("its global model cannot be used alone: devices export their own");
  return parts.join("; ");
}

function tilesOf({ federation, doing, evaluating, everything_bytes: everything, metrics_personal: own, metrics_global: common }, rounds) {
  const sum = (of) => rounds.reduce((total, point) => total + of(point), 0);
  const last = (of) => rounds.map(of).findLast((value) => value != null);
  const sent = sum((p) => p.bytes_up + p.bytes_down);
  const whole = sum((p) => p.whole_bytes);
  const [measured, estimated] = [sum((p) => p.joules_measured), sum((p) => p.joules_estimated)];
  const [personal, decile, shared] = [last((p) => p.accuracy_personal), last((p) => p.accuracy_personal_decile), last((p) => p.accuracy_global)];
  const at = doing.training ?? 0;
  return [
    ["Round", `${federation.round} of ${federation.rounds}`, `${federation.method} on ${federation.task}`],
    ["Devices", `${federation.devices}`, `${at} training, ${evaluating} evaluating, ${federation.devices_stopped} stopped`],
    personal != null && ["Personal accuracy", percent(personal), decile != null && `bottom decile ${percent(decile)}`],
    shared != null && ["Global accuracy", percent(shared), "mean over devices"],
    ...Object.entries(own).map(([name, value]) => [`Personal ${name}`, value.toPrecision(3), "mean over devices"]),
    ...Object.entries(common).map(([name, value]) => [`Global ${name}`, value.toPrecision(3), "mean over devices"]),
    federation.frozen_bytes > 0 && ["Frozen, bytes", bytes(federation.frozen_bytes), "downloaded once by each device, never sent"],
    whole > 0 && ["Training, bytes", bytes(sent), `both ways, ${percent(sent / whole)} of sending the whole model`],
    everything > 0 && ["Everything, bytes", bytes(Math.max(everything, sent)), "with evaluation, publication and all other calls"],
    measured > 0 && ["Energy, measured", joules(measured), "training and transfer"],
    estimated > 0 && ["Energy, estimated", joules(estimated), "training and transfer"],
    federation.privacy && ["Privacy spent", `ε ≤ ${federation.privacy.epsilon.toPrecision(3)}`, `δ = ${federation.privacy.delta}, ${federation.privacy.adjacency.replace("_", "-")}`],
  ].filter(Boolean);
}

const PHASES = ["keys", "shares", "train", "agree", "unmask"];

/** Where a secure round is, as text; nothing for any other. */
function phaseOf(running) {
  return running.phase ? `, phase ${PHASES.indexOf(running.phase) + 1} of ${PHASES.length} (${running.phase})` : "";
}

function showRunning() {
  const running = overview?.open_round;
  $("running").hidden = !running;
  if (!running) return;
  const left = (Date.parse(running.deadline_at) - Date.now() - skew) / 1000;
  const went = [
    running.returned && `${many(running.returned, "device")} handed back`,
    running.expired && `${many(running.expired, "device")} too late`,
    running.extensions && `extended ${many(running.extensions, "time")}`,
  ].filter(Boolean);
  const paused = overview.federation.status === "paused";
  const deadline = paused ? "paused" : left > 0 ? `${seconds(left)} to its deadline` : "its deadline has passed";
  $("running-text").textContent = [
    `Round ${running.round}${phaseOf(running)}: ${running.done} of ${many(running.cohort, "device")} answered; closes at ${running.target}`, ...went, deadline,
  ].join("; ");
  $("progress").max = Math.max(1, running.target);
  $("progress").value = Math.min(running.done, running.target);
  const more = running.cohort - running.done - running.returned - running.expired - running.waiting_for.length;
  $("waiting").hidden = !running.waiting_for.length;
  const names = running.waiting_for.map((each) =>
    `${each.device} (${each.kind} since ${seconds(Math.round(since(each.since)))}, heard ${seconds(Math.round(since(each.heard_at)))} ago)`);
  $("waiting-names").textContent = names.join(", ") + (more > 0 ? ` and ${more} more` : "");
}

function showDownloads(federation) {
  const link = (path, kind, text) => element("li", {}, [
    element("a", { href: `${api}/${path}`, textContent: text, download: `${federation.name}${kind}` }),
  ]);
  $("downloads").replaceChildren(
    ...(federation.global_model_usable
      ? [link("model", ".safetensors", "Global model (safetensors)"), link("model.onnx", ".onnx", "Global model (ONNX)")]
      : [element("li", { textContent: "No global model: it cannot be used alone here." })]),
    link("rounds?format=csv", ".csv", "Records of all rounds (CSV)"),
    link("rounds", ".json", "Records of all rounds (JSON)"),
  );
}

// --- devices --------------------------------------------------------------------------------------------------------

let offset = 0;
let devicesAt = -Infinity;
let devicesNext;
let devicesAsked;

function showKinds() {
  const select = $("find").elements.doing;
  for (const [value, text] of Object.entries(DOING)) {
    const known = [...select.options].find((option) => option.value === value);
    const option = known ?? select.appendChild(element("option", { value }));
    option.textContent = `${text} (${overview.doing[value] ?? 0})`;
  }
}

async function showDevices() {
  devicesAt = performance.now();
  clearTimeout(devicesNext);
  devicesNext = setTimeout(showDevices, IDLE_SECONDS * 1000);
  const wanted = new URLSearchParams({ limit: PAGE, offset });
  for (const [key, value] of new FormData($("find"))) if (value) wanted.set(key, value);
  const asked = (devicesAsked = wanted.toString());
  const answer = await call("GET", `${api}/devices?${wanted}`);
  if (!answer || asked !== devicesAsked || $("ask").open || $("history").open) return; // whose button is to have the focus again
  const devices = await answer.json();
  const total = Number(answer.headers.get("Sparrow-Total"));
  if (!devices.length && offset) return turn(-offset);
  const body = $("devices").tBodies[0];
  const focused = document.activeElement?.dataset?.focus;
  body.replaceChildren(...devices.map(rowOf));
  if (focused) body.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  $("devices").querySelector("th.actions").hidden = !overview?.may_change;
  put("count", total ? `${offset + 1} to ${offset + devices.length} of ${many(total, "device")}` : "No device.");
  $("previous").disabled = !offset;
  $("next").disabled = offset + devices.length >= total;
}

function rowOf(device) {
  const cells = [
    element("th", { scope: "row" }, [nameOf(device)]),
    element("td", { textContent: device.profile.board || "unknown" }),
    element("td", { className: "number", textContent: device.budget.toLocaleString("en", { maximumFractionDigits: 3 }) }),
    element("td", {}, [whatOf(device), ...(device.failure ? [element("p", { className: "failure", textContent: whyOf(device.failure) })] : [])]),
    element("td", {}, [element("time", { dateTime: device.seen_at, textContent: ago(device.seen_at) })]),
  ];
  if (overview?.may_change) {
    const revoke = element("button", { type: "button", textContent: "Revoke", ariaLabel: `Revoke ${device.name}`, disabled: device.doing === "revoked" });
    revoke.dataset.focus = `revoke ${device.device_id}`;
    revoke.addEventListener("click", async () => {
      if (!(await sure(`Take ${device.name}'s token away for good? It can then do nothing here any more.`, "Revoke"))) return;
      if (await call("PATCH", `v1/devices/${device.device_id}`, { revoked: true })) await showDevices();
    });
    cells.push(element("td", {}, [revoke]));
  }
  return element("tr", {}, cells);
}

/** The name of a device, with which its history is opened. */
function nameOf(device) {
  const button = element("button", { type: "button", className: "link", textContent: device.name, ariaHasPopup: "dialog" });
  button.dataset.focus = `history ${device.device_id}`;
  button.addEventListener("click", () => showHistory(device));
  return button;
}

function whyOf(failure) {
  return `${failure.reason}${failure.round ? ` (${failure.kind}, round ${failure.round})` : ""}, ${ago(failure.at)}`;
}

async function showHistory({ device_id: id, name }) {
  const answer = await call("GET", `v1/devices/${id}?most=100`);
  if (!answer) return;
  const { device, work } = await answer.json();
  const shown = (value, text) => (value == null ? "–" : text(value));
  const rows = work.map((each) => element("tr", {}, [
    element("th", { scope: "row", className: "number", textContent: each.round }),
    ...[
      each.kind, each.reason ? `${each.status}: ${each.reason}` : each.status,
      shown(each.loss, (loss) => loss.toPrecision(3)), shown(each.accuracy ?? each.accuracy_global, percent),
      shown(each.seconds, seconds), shown(each.bytes_up, bytes), shown(each.bytes_down, bytes), shown(each.joules, joules),
    ].map((textContent) => element("td", { textContent })),
  ]));
  $("history-title").textContent = name;
  $("history-about").textContent = [
    device.profile.board, device.profile.system, `budget ${device.budget}`, whatOf(device), `last seen ${ago(device.seen_at)}`,
  ].filter(Boolean).join(" · ");
  $("history-failure").hidden = !device.failure;
  $("history-failure").textContent = device.failure ? whyOf(device.failure) : "";
  $("history-work").tBodies[0].replaceChildren(...rows);
  $("history-none").hidden = rows.length > 0;
  $("history").showModal();
}

function whatOf(device) {
  if (device.doing === "stopped") return `stopped at round ${device.stopped_round}`;
  if (device.doing === "paused") return `paused: ${PAUSED[device.paused] ?? device.paused}`;
  if (device.doing === "small_budget") return `budget below the ${overview?.smallest_budget} that is needed`;
  return DOING[device.doing] ?? device.doing;
}

function refreshDevices() {
  clearTimeout(devicesNext);
  devicesNext = setTimeout(showDevices, Math.max(0, devicesAt + DEVICES_SECONDS * 1000 - performance.now()));
}

function turn(by) {
  offset = Math.max(0, offset + by);
  return showDevices();
}

let typing;
$("find").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => turn(-offset), 200);
});
$("find").addEventListener("submit", (event) => event.preventDefault());
$("previous").addEventListener("click", () => turn(-PAGE));
$("next").addEventListener("click", () => turn(PAGE));

// --- changes --------------------------------------------------------------------------------------------------------

const ACTIONS = {
  waiting: ["pause", "stop", "delete"], running: ["pause", "stop"], paused: ["resume", "stop"],
  finished: ["reopen", "delete"], stopped: ["reopen", "delete"],
};
const LABELS = { pause: "Pause", resume: "Resume", stop: "Stop", reopen: "Reopen", delete: "Delete" };

function showAdmin(federation) {
  $("administer").hidden = overview.may_change;
  $("admin").hidden = !overview.may_change;
  if (!overview.may_change) return;
  const actions = ACTIONS[federation.status];
  if ($("actions").dataset.of !== actions.join()) {
    $("actions").dataset.of = actions.join();
    const focused = $("actions").contains(document.activeElement);
    $("actions").replaceChildren(...actions.map((action) => {
      const button = element("button", { type: "button", textContent: LABELS[action] });
      button.addEventListener("click", () => act(action));
      return button;
    }));
    if (focused) $("actions").firstElementChild.focus();
  }
  const { cohort, deadline_seconds: deadline } = federation.settings;
  for (const [key, value] of Object.entries({ rounds: federation.rounds, cohort, deadline_seconds: deadline })) {
    const field = $("settings").elements[key];
    if (!field.dataset.touched) field.value = value;
  }
}

async function remove(federation) {
  const whole = `${many(federation.devices, "device")}, ${many(federation.round, "round")} and all its models`;
  if (!(await sure(`Delete ${federation.name} for good, with ${whole}?`, "Delete"))) return;
  disconnect(); // or its end would be told as an error
  if (await call("DELETE", api)) location.replace(location.pathname); // to the newest of the others
  else connect();
}

async function act(action) {
  const { federation } = overview;
  if (action === "delete") return remove(federation);
  const change = { action };
  if (action === "stop" && !(await sure(`Stop ${federation.name}? Its devices export what they have and leave.`, "Stop"))) return;
  const field = $("settings").elements.rounds;
  if (action === "reopen" && Number(field.value) > federation.rounds) change.rounds = Number(field.value);
  if (!(await call("PATCH", api, change))) return;
  if (change.rounds) delete field.dataset.touched;
  said(`${LABELS[action]}: done.`);
}

$("settings").addEventListener("input", (event) => { event.target.dataset.touched = "yes"; });
$("settings").addEventListener("submit", async (event) => {
  event.preventDefault();
  // Only what was typed: the rest may have been changed by somebody else meanwhile.
  const fields = [...event.currentTarget.elements].filter((field) => field.dataset.touched);
  if (!fields.length) return said("Nothing was changed.");
  if (!(await call("PATCH", api, Object.fromEntries(fields.map((field) => [field.name, Number(field.value)]))))) return;
  for (const field of fields) delete field.dataset.touched;
  said("Saved.");
});

function said(text) {
  $("done").textContent = text;
}

function sure(question, yes) {
  const dialog = $("ask");
  $("question").textContent = question;
  $("yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

// Most who look at a page invite nobody: what that takes is loaded when it is asked for.
$("invite").addEventListener("click", async () => {
  const { invite } = await import("./invite.js").catch(() => ({}));
  if (invite) invite(`${api}/join-link`, overview.enrolment_guarded, reason);
  else fail("The coordinator did not answer: try again.", true);
});

/** The answer, or null where there is none: then the page says why. */
async function call(method, path, body) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  const looking = method === "GET";
  try {
    const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
    if (!answer.ok) {
      fail(await reason(answer), looking);
      return null;
    }
    mended(looking);
    return answer;
  } catch (error) {
    if (!looking) fail("The coordinator did not answer: look whether this was changed before you try again.", looking);
    return null;
  }
}

async function reason(answer) {
  const problem = await answer.json().catch(() => ({}));
  return problem.detail ?? `${answer.url}: ${answer.status}`;
}

function fail(text, looking) {
  put("error", text);
  $("error").hidden = false;
  $("error").dataset.looking = looking ? "yes" : "";
}

/** What was said of a look is over with the next one that works; of a change, with the next change. */
function mended(looking) {
  if (!looking || $("error").dataset.looking) $("error").hidden = true;
}

// --- the stream -----------------------------------------------------------------------------------------------------

let source;
let retry;
let pause = RETRY_SECONDS;
let fresh = true;

function tell(text, lost) {
  put("connection", text);
  $("connection").classList.toggle("lost", lost);
}

function connect() {
  disconnect();
  const mine = (source = new EventSource(`${api}/events`));
  mine.addEventListener("open", () => {
    [fresh, pause] = [true, RETRY_SECONDS];
    tell("live", false);
    mended(true);
  });
  mine.addEventListener("overview", (event) => show(JSON.parse(event.data)));
  mine.addEventListener("error", async () => {
    tell("connection lost, trying again", true);
    if (mine.readyState !== EventSource.CLOSED) return; // it tries again by itself
    const answer = await fetch(`${api}/overview`).catch(() => null); // says why, where it is not just down
    const why = answer && !answer.ok ? await reason(answer) : null;
    if (mine !== source) return;
    if (why) fail(why, true);
    if ([401, 404].includes(answer?.status)) return tell("not connected: load this page again", true);
    retry = setTimeout(connect, pause * 1000);
    pause = Math.min(2 * pause, LONGEST_RETRY_SECONDS);
  });
}

function disconnect() {
  clearTimeout(retry);
  clearTimeout(devicesNext);
  source?.close();
  source = null;
}

/** Nobody sees a page in the background: it lets go, for browsers make six connections to a server and no more. */
function listen() {
  if (document.hidden) disconnect();
  else connect();
}

$("federation").addEventListener("change", (event) => { location.search = new URLSearchParams({ federation: event.target.value }); });
setInterval(showRunning, 1000);
$("administer").search = location.search;
if (name) {
  listen();
  document.addEventListener("visibilitychange", listen);
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => event.persisted && listen());
} else {
  tell("no federation", false);
  fail("There is no federation yet. Publish one (sparrow publish NAME), then load this page again.", true);
}
