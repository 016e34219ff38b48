// The first page: all federations, a line each, those that need attention first.

import { call, mended } from "./calls.js";
import { element } from "./charts.js";
import { ago, many, percent } from "./text.js";

const LOOK_SECONDS = 5;
const $ = (id) => document.getElementById(id);

let next;

/** Show them, and go on. tell: says whether the coordinator answers; nothing: what to do if there is none; rights: shows
    what the caller may do. */
export function begin({ tell, nothing, rights }) {
  const look = async () => {
    clearTimeout(next);
    if (document.hidden) return;
    next = setTimeout(look, LOOK_SECONDS * 1000);
    const answer = await call("GET", "v1/summaries");
    tell(answer ? "live" : "connection lost, trying again", !answer);
    if (!answer) return;
    mended();
    const found = await answer.json();
    rights(found);
    if (found.federations.length) return show(found.federations);
    clearTimeout(next);
    document.removeEventListener("visibilitychange", look);
    nothing();
  };
  document.title = "Federations – Sparrow";
  for (const each of document.querySelectorAll(".of-one")) each.hidden = true;
  document.addEventListener("visibilitychange", look);
  look();
}

function show(found) {
  $("federations-place").hidden = false;
  const running = (each) => each.status === "running";
  const order = (each) => [attention(each).length > 0 && !ended(each), running(each)].map(Number);
  const sorted = [...found].sort((one, other) => {
    const [mine, theirs] = [order(one), order(other)];
    return theirs[0] - mine[0] || theirs[1] - mine[1];
  });
  const body = $("federations").tBodies[0];
  const text = JSON.stringify(sorted.map((each) => ({ ...each, heard_at: each.heard_at && ago(each.heard_at) })));
  if (body.dataset.of === text) return; // or a link in it would lose the focus
  body.dataset.of = text;
  const focused = document.activeElement?.dataset?.focus;
  body.replaceChildren(...sorted.map(rowOf));
  if (focused) body.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

const ended = (each) => ["finished", "stopped"].includes(each.status);

/** What an operator should look at. */
function attention(each) {
  return [
    each.failed > 0 && `${many(each.failed, "device")} failed`,
    each.away > 0 && !ended(each) && `${many(each.away, "device")} away`,
    each.warning,
  ].filter(Boolean);
}

function rowOf(each) {
  const cell = (label, children, className = "") => {
    const made = element("td", { className }, [element("span", {}, children)]);
    made.dataset.label = label;
    return made;
  };
  const link = element("a", { href: `?${new URLSearchParams({ federation: each.name })}`, textContent: each.name });
  link.dataset.focus = each.name;
  const watch = attention(each);
  return element("tr", {}, [
    element("th", { scope: "row" }, [link, element("small", { textContent: `${each.method} on ${each.task}` })]),
    cell("State", [element("span", { className: `badge ${each.status}`, textContent: each.status })]),
    cell("Round", [`${each.round} of ${each.rounds} `, element("progress", { max: each.rounds, value: each.round, ariaLabel: `Rounds of ${each.name}` })]),
    cell("Devices", [[many(each.devices, "device"), each.paused > 0 && `${each.paused} paused`].filter(Boolean).join(", ")], "number"),
    cell("Accuracy", [each.accuracy == null ? "–" : percent(each.accuracy)], "number"),
    cell("Attention", [watch.join("; ") || "–"], watch.length && !ended(each) ? "failure" : ""),
    cell("Last call", [each.heard_at == null ? "–" : ago(each.heard_at)]),
  ]);
}
