// The page: one stream of events says how a federation stands, and its first screen answers five questions.

import { call, fail, mended, put, reason } from "./calls.js";
import * as changes from "./changes.js";
import { Chart, element, Scale } from "./charts.js";
import * as devices from "./devices.js";
import { ago, bytes, joules, many, past, percent, plain, points, seconds, setClock, since, until } from "./text.js";
import { Marks, Timeline } from "./timeline.js";

const [RETRY_SECONDS, LONGEST_RETRY_SECONDS] = [3, 60];
const OTHERS_SECONDS = 30; // how often a federation that is compared with is looked at again
const NOTHING_SECONDS = 3; // how often it is asked whether there is a federation
const $ = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
const name = asked.get("federation") || (asked.has("all") ? "" : document.documentElement.dataset.federation);
const api = `v1/federations/${encodeURIComponent(name)}`;
const REASONS = { all_stopped: "every device stopped", max_rounds: "all rounds done", too_few: "too few devices still train for a secure sum", operator: "stopped by an operator" };

// --- charts ---------------------------------------------------------------------------------------------------------

const per = (of) => (point) => of(point) / (point.round - point.first + 1);
const nonzero = (of) => (point) => of(point) || null;
const scale = new Scale($("charts-scale"), "Charts");
const CHARTS = [
  ["Accuracy", percent, [
    ["personal mean", (p) => p.accuracy_personal],
    ["bottom decile", (p) => p.accuracy_personal_decile],
    ["global", (p) => p.accuracy_global],
  ], undefined, 1],
  ["Loss", plain, [
    ["personal", (p) => p.loss_personal], ["global", (p) => p.loss_global], ["training", (p) => p.train_loss],
  ]],
  ["Duration of a round", seconds, [
    ["by the clock", per((p) => p.seconds)], ["slowest device", (p) => p.device_seconds_slowest],
    ["median device", (p) => p.device_seconds_median],
  ], 0],
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
].map(([title, format, lines, least, most]) => {
  const own = lines.map(([label, value]) => ({ label, value }));
  return { own, chart: new Chart($("charts"), title, own, format, scale, { least, most }) };
});
const marks = new Marks(api, (found) => scale.mark(found));

function drawCharts(rounds) {
  const other = others.get($("compare").value);
  const found = other ? beside(rounds, other.points) : rounds;
  for (const { own, chart } of CHARTS) {
    const theirs = own.slice(0, 2).map(({ label, value }) => ({ label: `${$("compare").value}: ${label}`, value: (p) => p.other && value(p.other) }));
    const mine = own.map(({ label, value }) => ({ label, value: (p) => (p.alone ? null : value(p)) }));
    chart.lines = other ? [...mine, ...theirs] : own;
    chart.draw(found);
  }
}

/** The points of two federations as one series: of rounds that only the other has, there is ``other`` alone. */
function beside(rounds, theirs) {
  const found = new Map(rounds.map((point) => [point.round, { ...point }]));
  for (const point of theirs) {
    const ours = found.get(point.round) ?? { alone: true, first: point.first, round: point.round };
    found.set(point.round, { ...ours, other: point });
  }
  return [...found.values()].sort((one, other) => one.round - other.round);
}

// --- other federations ------------------------------------------------------------------------------------------------

const others = new Map(); // overviews, by name

/** Look at the one that is compared with, and at training alone on the same task, which ours is to surpass. */
async function lookAtOthers() {
  const alone = overview?.federations.find((line) => line.method === "local" && line.task === overview.federation.task && line.name !== name);
  for (const other of new Set([$("compare").value, alone?.name])) {
    if (!other) continue;
    const answer = await fetch(`v1/federations/${encodeURIComponent(other)}/overview`).catch(() => null);
    if (answer?.ok) others.set(other, await answer.json());
    else others.delete(other);
  }
  if (overview) showAll();
}

function showFederations({ federation, federations }) {
  const known = federations.some((line) => line.name === name) ? federations : [federation, ...federations];
  const texts = known.map((line) => `${line.name} (${line.status})`);
  if ($("federation").dataset.of === texts.join()) return; // or it would close while its user chooses
  $("federation").dataset.of = texts.join();
  const all = element("option", { value: "", textContent: "All federations" });
  $("federation").replaceChildren(...known.map((line, index) =>
    element("option", { value: line.name, selected: line.name === name, textContent: texts[index] })), all);
  const chosen = $("compare").value;
  const rest = known.filter((line) => line.name !== name);
  $("compare").replaceChildren(element("option", { value: "", textContent: "nothing" }), ...rest.map((line) =>
    element("option", { value: line.name, selected: line.name === chosen, textContent: `${line.name} (${line.method})` })));
  $("compare-with").hidden = !rest.length;
  lookAtOthers();
}

// --- how it stands --------------------------------------------------------------------------------------------------

let overview;
let timeline;
let known = new Map();
let rounds = [];

function show(news) {
  if (!overview || overview.span !== news.span || fresh) known = new Map();
  fresh = false;
  overview = news;
  setClock(news.at);
  for (const point of news.points) known.set(point.first, point);
  rounds = [...known.values()].sort((one, other) => one.round - other.round);
  const { federation } = news;
  document.title = `${federation.name}: ${federation.status}, round ${federation.round} – Sparrow`;
  put("name", federation.name);
  put("status", federation.status);
  $("status").className = `badge ${federation.status}`;
  put("state", stateOf(federation));
  $("nothing").hidden = $("loading").hidden = true;
  if (overview.federation.status === "waiting" && $("joining").dataset.shown === undefined) $("joining").open = true;
  $("joining").dataset.shown = "";
  for (const each of document.querySelectorAll(".of-one")) each.hidden = false;
  const pages = federation.device_kinds.includes("page");
  $("invite").hidden = !pages && !news.may_change;
  put("invite", pages ? "Invite a phone" : "Invite a device");
  $("show-tokens").hidden = !news.makes_tokens;
  $("sign-out").hidden = !news.signed_in;
  $("sign-in").hidden = news.may_change;
  put("sign-in", news.signed_in ? "Sign in as administrator" : "Sign in");
  $("new").hidden = !news.may_change;
  showFederations(news);
  showAll();
  changes.show(federation, news.may_change);
  showDownloads(federation);
  devices.refresh();
  marks.follow(news.newest_event);
  if (news.newest_event !== timeline?.newest) {
    timeline ??= new Timeline($("events"), api, { linkTo: devices.linkTo });
    timeline.newest = news.newest_event;
    timeline.news();
  }
}

function showAll() {
  showHealth();
  showAccuracy();
  showFleet();
  showCost();
  showTime();
  showJoining();
  showFigures();
  drawCharts(rounds);
}

function stateOf(federation) {
  return [
    `${federation.method} on ${federation.task}`,
    federation.smallest_sum != null && `secure sums of at least ${federation.smallest_sum} devices (c = ${federation.settings.secure_colluders} may collude)`,
    federation.reason && `ended: ${REASONS[federation.reason] ?? federation.reason}`,
    federation.waiting_for && `waiting for ${federation.waiting_for}`,
    federation.rollback_version != null && `goes back to model ${federation.rollback_version} when this round has closed`,
    federation.replacing && "takes a new version of its model when this round has closed",
    !federation.global_model_usable && "its global model cannot be used alone: devices export their own",
  ].filter(Boolean).join("; ");
}

const sum = (of) => rounds.reduce((total, point) => total + of(point), 0);
const last = (of, from = rounds) => from.map(of).findLast((value) => value != null);

/** Show an answer. value: in large letters; lines: texts or elements below. */
function answer(id, value, lines) {
  put(`${id}-value`, value);
  const made = lines.filter(Boolean).map((line) => element("li", { title: line.textContent ?? line }, [line]));
  const text = made.map((line) => line.textContent).join("\n");
  if ($(`${id}-lines`).dataset.of === text) return; // or a button in it would lose the focus
  $(`${id}-lines`).dataset.of = text;
  $(`${id}-lines`).replaceChildren(...made);
}

const button = (text, act) => {
  const made = element("button", { type: "button", className: "link", textContent: text });
  made.addEventListener("click", act);
  return made;
};

function showHealth() {
  const { federation, notices, doing } = overview;
  const missing = federation.settings.min_devices - federation.devices;
  const well = { waiting: "Waiting", running: "Well", paused: "Paused", finished: "Finished", stopped: "Stopped" }[federation.status];
  $("health").classList.toggle("troubled", notices.length > 0);
  const [worst] = notices;
  const ended = ["finished", "stopped"].includes(federation.status);
  const waits = !notices.length && federation.waiting_for;
  answer("health", notices.length && !ended ? "Needs attention" : waits ? "Waits" : well, [
    ...(worst ? told(worst) : []),
    federation.status === "waiting" && missing > 0 && `Begins when ${many(missing, "more device")} ${missing === 1 ? "has" : "have"} joined`,
    !worst && federation.status === "running" && (doing.training ?? 0) > 0 && `${many(doing.training, "device")} training`,
    waits && `Waits for ${federation.waiting_for}`,
    !worst && !waits && federation.status !== "waiting" && "No device failed, none is missing",
  ]);
  $("all-notices").classList.toggle("unused", !notices.length);
  put("all-notices-count", many(notices.length, "notice"));
  const texts = notices.map((each) => told(each).map((text) => text.replace(/\.?$/, ".")).join(" "));
  if ($("notices").dataset.of !== texts.join("\n")) {
    $("notices").dataset.of = texts.join("\n");
    $("notices").replaceChildren(...texts.map((textContent) => element("li", { textContent })));
  }
}

/** A notice in words: what, since when, what to do. */
function told({ text, since: when, remedy }) {
  return [when ? `${text} (since ${past(when)})` : text, remedy].filter(Boolean);
}

function showAccuracy() {
  // A round that some devices still judge says little: they answer at different times.
  const settled = rounds.filter((point) => !overview.evaluating || point.round < overview.evaluating_since);
  const judged = settled.some((point) => point.accuracy_personal != null || point.accuracy_global != null) ? settled : rounds;
  const of = last((p) => p.accuracy_personal, judged) != null ? (p) => p.accuracy_personal : (p) => p.accuracy_global;
  const [now, before] = judged.filter((point) => of(point) != null).reverse();
  const shared = last((p) => p.accuracy_global, judged);
  const alone = [...others.values()].find((each) => each.federation.method === "local" && each.federation.task === overview.federation.task);
  const local = alone && last((p) => p.accuracy_personal, alone.points);
  const metrics = Object.entries({ ...overview.metrics_global, ...overview.metrics_personal });
  answer("accuracy", now ? percent(of(now)) : "Not judged yet", [
    now && (now.accuracy_personal != null ? "mean of personal models" : "global model, mean over devices"),
    now?.accuracy_personal_decile != null &&
      button(`worst decile ${percent(now.accuracy_personal_decile)}`, () => devices.list({ by: "accuracy" })),
    before && `${points(of(now) - of(before))} since round ${before.round}`,
    now && local != null && `${points(of(now) - local)} against training alone (${alone.federation.name})`,
    now?.accuracy_personal != null && shared != null && `global model ${percent(shared)}`,
    ...metrics.slice(0, 2).map(([metric, value]) => `${metric} ${plain(value)}`),
  ]);
}

function showFleet() {
  const { federation, doing, failing, not_exported: unsaved } = overview;
  const gone = (doing.offline ?? 0) + (doing.away ?? 0);
  const kept = (doing.resting ?? 0) + (doing.small_budget ?? 0);
  const ended = ["finished", "stopped"].includes(federation.status);
  const newest = rounds.findLast((point) => point.slowest);
  answer("fleet", federation.devices ? (ended && !gone ? many(federation.devices, "device") : `${(federation.devices - gone).toLocaleString("en")} of ${many(federation.devices, "device")}`) : "No device yet", [
    failing > 0 && button(`${many(failing, "device")} failing`, () => devices.list({ only: "failing" })),
    doing.not_joined > 0 && button(`${many(doing.not_joined, "device")} could not join`, () => devices.list({ doing: "not_joined" })),
    gone > 0 && button(`${many(gone, "device")} gone`, () => devices.list({ doing: doing.offline ? "offline" : "away" })),
    doing.untrained > 0 && button(`${many(doing.untrained, "device")} trained nothing`, () => devices.list({ doing: "untrained" })),
    doing.paused > 0 && button(`${many(doing.paused, "device")} paused`, () => devices.list({ doing: "paused" })),
    kept > 0 && `${many(kept, "device")} resting or too small`,
    ended && unsaved > 0 && button(`${many(unsaved, "device")} did not export`, () => devices.list({ only: "not_exported" })),
    ended && federation.devices > 0 && !unsaved && "all devices exported their model",
    federation.devices_stopped > 0 && `${many(federation.devices_stopped, "device")} stopped early`,
    newest && button(`slowest: ${newest.slowest}, ${seconds(newest.device_seconds_slowest)}`, () => devices.list({ by: "-seconds" })),
    newest && `median device ${seconds(newest.device_seconds_median)} a round`,
  ]);
}

function showCost() {
  const { federation, everything_bytes: everything } = overview;
  const [sent, whole] = [sum((p) => p.bytes_up + p.bytes_down), sum((p) => p.whole_bytes)];
  const [measured, estimated] = [sum((p) => p.joules_measured), sum((p) => p.joules_estimated)];
  const all = Math.max(everything, sent);
  answer("cost", bytes(all), [
    "everything counted, both ways",
    federation.devices > 0 && all > 0 && `${bytes(all / federation.devices)} a device`,
    whole > 0 && `training ${percent(sent / whole)} of whole models`,
    measured > 0 && `${joules(measured)} measured`,
    estimated > 0 && `${joules(estimated)} estimated`,
    federation.privacy && `privacy spent: ε ≤ ${federation.privacy.epsilon.toPrecision(3)}`,
  ]);
}

const PHASES = ["keys", "shares", "train", "agree", "unmask"];

function showTime() {
  const { federation, open_round: running, began_at: began, ends_at: ends } = overview;
  const taken = sum((p) => p.seconds);
  const each = rounds.length ? taken / rounds.reduce((total, point) => total + point.round - point.first + 1, 0) : null;
  const ended = ["finished", "stopped"].includes(federation.status);
  const value = ended ? "Ended" : ends ? `Within ${seconds(Math.max(1, until(ends)))}` : federation.waiting_for ? "Waits" : federation.status === "waiting" ? "Not begun" : `Round ${federation.round + 1}`;
  answer("time", value, [
    federation.waiting_for && `No end in sight: waits for ${federation.waiting_for}`,
    `${federation.round} of ${many(federation.rounds, "round")} closed`,
    began && `began ${ago(began)}`,
    ended && taken > 0 && `trained for ${seconds(taken)}`,
    each && `a round takes ${seconds(each)}`,
    running && federation.status === "paused" && "paused",
    ...(running && federation.status !== "paused" ? roundOf(running) : []),
    running && (running.waiting_for.length ? `waits for ${waitedFor(running)}` : "waits for no device"),
  ]);
  $("progress").classList.toggle("unused", !running && !federation.round);
  $("progress").max = Math.max(1, federation.rounds);
  $("progress").value = federation.round + (running ? Math.min(1, running.done / Math.max(1, running.target)) : 0);
  if (!running?.waiting_for.length) return put("waiting-names", "No device.");
  const more = running.cohort - running.done - running.returned - running.expired - running.waiting_for.length;
  const names = running.waiting_for.map((one) =>
    `${one.device} (${one.kind} since ${seconds(Math.round(since(one.since)))}, heard ${seconds(Math.round(since(one.heard_at)))} ago)`);
  put("waiting-names", names.join(", ") + (more > 0 ? ` and ${more} more` : ""));
}

/** The open round in words: its answers, and its deadline. */
function roundOf(running) {
  const left = until(running.deadline_at);
  const phase = running.phase && `${running.phase} (phase ${PHASES.indexOf(running.phase) + 1} of ${PHASES.length}): `;
  const answers = [
    `${phase ?? ""}${running.done} of ${many(running.cohort, "answer")}`,
    running.target < running.cohort && `closes at ${running.target}`,
    running.returned && `${running.returned} handed back`,
    running.expired && `${running.expired} too late`,
    running.extensions && `extended ${many(running.extensions, "time")}`,
  ];
  const deadline = left > 0 ? `${seconds(left)} to its deadline` : "its deadline has passed";
  return [answers.filter(Boolean).join(", "), deadline];
}

function waitedFor({ waiting_for: [first, ...more] }) {
  return `${first.device}, ${seconds(Math.round(since(first.since)))}${more.length ? ` and ${more.length} more` : ""}`;
}

/** Show the command with which a device joins. */
function showJoining() {
  const { federation, enrolment_guarded: guarded } = overview;
  const server = new URL(".", location.href).href.replace(/\/$/, "");
  const colluders = federation.smallest_sum != null && federation.settings.secure_colluders;
  put("join-command", [
    guarded && "SPARROW_ENROLMENT_TOKEN=TOKEN",
    `sparrow join --server ${server} --federation ${federation.name}`,
    colluders !== false && `--require-secure ${colluders}`,
  ].filter(Boolean).join(" "));
  $("join-token").hidden = !guarded;
}

function showFigures() {
  const { federation, doing, evaluating, everything_bytes: everything, metrics_personal: own, metrics_global: common } = overview;
  const [sent, whole] = [sum((p) => p.bytes_up + p.bytes_down), sum((p) => p.whole_bytes)];
  const [measured, estimated] = [sum((p) => p.joules_measured), sum((p) => p.joules_estimated)];
  const [personal, decile, shared] = [last((p) => p.accuracy_personal), last((p) => p.accuracy_personal_decile), last((p) => p.accuracy_global)];
  const figures = [
    ["Round", `${federation.round} of ${federation.rounds}`, `${federation.method} on ${federation.task}`],
    ["Devices", `${federation.devices}`, `${doing.training ?? 0} training, ${evaluating} evaluating, ${federation.devices_stopped} stopped`],
    personal != null && ["Personal accuracy", percent(personal), decile != null && `bottom decile ${percent(decile)}`],
    shared != null && ["Global accuracy", percent(shared), "mean over devices"],
    ...Object.entries(own).map(([metric, value]) => [`Personal ${metric}`, value.toPrecision(3), "mean over devices"]),
    ...Object.entries(common).map(([metric, value]) => [`Global ${metric}`, value.toPrecision(3), "mean over devices"]),
    federation.frozen_bytes > 0 && ["Frozen, bytes", bytes(federation.frozen_bytes), "downloaded once by each device, never sent"],
    whole > 0 && ["Training, bytes", bytes(sent), `both ways, ${percent(sent / whole)} of sending the whole model`],
    everything > 0 && ["Everything, bytes", bytes(Math.max(everything, sent)), "with evaluation, publication and all other calls"],
    measured > 0 && ["Energy, measured", joules(measured), "training and transfer"],
    estimated > 0 && ["Energy, estimated", joules(estimated), "training and transfer"],
    federation.privacy && ["Privacy spent", `ε ≤ ${federation.privacy.epsilon.toPrecision(3)}`, `δ = ${federation.privacy.delta}, ${federation.privacy.adjacency.replace("_", "-")}`],
  ].filter(Boolean);
  $("tiles").replaceChildren(...figures.map(([term, value, more]) => element("div", {}, [
    element("dt", { textContent: term }),
    element("dd", { textContent: value }, more ? [element("small", { textContent: more })] : []),
  ])));
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

// --- where there is nothing to show -----------------------------------------------------------------------------------

/** Say what to do instead. Asks again until there is something. */
async function showNothing() {
  const found = await fetch("v1/federations").catch(() => null);
  const federations = found?.ok ? await found.json() : [];
  if (!name && federations.length) return location.reload();
  for (const each of document.querySelectorAll(".of-one")) each.hidden = true;
  $("nothing").hidden = false;
  $("loading").hidden = true;
  put("nothing-title", name ? `There is no federation ${name}` : "No federation yet");
  put("nothing-text", federations.length ? "These exist:" : "Make one, and this page shows it: a built-in task, or a model of your own.");
  $("nothing-commands").hidden = federations.length > 0;
  put("nothing-server", ` --server ${new URL(".", location.href).href.replace(/\/$/, "")}`);
  const links = federations.map((each) => each.name);
  if ($("nothing-links").dataset.of !== links.join()) {
    $("nothing-links").dataset.of = links.join();
    $("nothing-links").replaceChildren(...links.map((each) =>
      element("li", {}, [element("a", { href: `?${new URLSearchParams({ federation: each })}`, textContent: each })])));
  }
  if (federations.some((each) => each.name === name)) return listen();
  setTimeout(showNothing, NOTHING_SECONDS * 1000);
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
    mended();
  });
  mine.addEventListener("overview", (event) => show(JSON.parse(event.data)));
  mine.addEventListener("error", async () => {
    tell("connection lost, trying again", true);
    if (mine.readyState !== EventSource.CLOSED) return; // it tries again by itself
    const answered = await fetch(`${api}/overview`).catch(() => null); // says why, where it is not just down
    const why = answered && !answered.ok ? await reason(answered) : null;
    if (mine !== source) return;
    if (answered?.status === 404) {
      tell("no such federation", false);
      return showNothing();
    }
    if (why) fail(why);
    if (answered?.status === 401) {
      $("sign-in").hidden = false;
      return tell("signed out: sign in again", true);
    }
    retry = setTimeout(connect, pause * 1000);
    pause = Math.min(2 * pause, LONGEST_RETRY_SECONDS);
  });
}

function disconnect() {
  clearTimeout(retry);
  devices.pause();
  source?.close();
  source = null;
}

/** Nobody sees a page in the background: it lets go, for browsers make six connections to a server and no more. */
function listen() {
  if (!name) return;
  if (document.hidden) disconnect();
  else connect();
}

$("federation").addEventListener("change", (event) => {
  location.search = event.target.value ? new URLSearchParams({ federation: event.target.value }) : "?all";
});
for (const id of ["new", "nothing-new"]) $(id).addEventListener("click", async () => {
  const { create } = await import("./create.js").catch(() => ({}));
  if (create) create();
  else fail("The coordinator did not answer: try again.");
});
$("compare").addEventListener("change", lookAtOthers);
$("sign-in").search = location.search || (name ? `?${new URLSearchParams({ federation: name })}` : "");
$("sign-out").addEventListener("click", async () => {
  disconnect();
  if (await call("POST", "sign-out")) location.assign("sign-in?note=out");
});
$("join-copy").addEventListener("click", async () => {
  const { copy } = await import("./copy.js").catch(() => ({}));
  if (copy) copy($("join-command"), $("join-copied"));
  else fail("The coordinator did not answer: try again.");
});
// Most who look at a page invite nobody: what that takes is loaded when it is asked for.
$("invite").addEventListener("click", async () => {
  const { invite } = await import("./invite.js").catch(() => ({}));
  if (invite) invite(api, overview, reason);
  else fail("The coordinator did not answer: try again.");
});
$("show-tokens").addEventListener("click", async () => {
  const tokens = await import("./tokens.js").catch(() => null);
  if (tokens) tokens.open(overview, changes.sure);
  else fail("The coordinator did not answer: try again.");
});

devices.begin(api, () => overview, changes.sure);
changes.begin(api, disconnect, connect);
setInterval(() => overview && !document.hidden && showTime(), 1000);
setInterval(() => overview?.federation.status === "running" && !document.hidden && lookAtOthers(), OTHERS_SECONDS * 1000);
if (name) {
  listen();
  document.addEventListener("visibilitychange", () => overview && listen());
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => event.persisted && listen());
} else {
  const federations = await import("./federations.js").catch(() => null);
  federations?.begin({
    tell,
    nothing: () => {
      tell("no federation", false);
      showNothing();
    },
    rights: ({ may_change: may, signed_in: known }) => {
      $("new").hidden = !may;
      $("sign-out").hidden = !known;
      $("sign-in").hidden = may;
    },
  });
}
