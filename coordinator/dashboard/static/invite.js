// The dialog with the link and the command that make a device of this federation. The coordinator makes them, with an
// enrolment token of their own if devices need one; here they are gone with the dialog, as is a token typed by hand.

import { element } from "./charts.js";
import { copies } from "./copy.js";
import { many, seconds, until } from "./text.js";

const $ = (id) => document.getElementById(id);
const dialog = $("invitation");
const token = $("invitation-token").elements.token;
const limits = $("invitation-limits").elements;
const server = new URL(".", location.href).href; // as this page was called, a proxy's path included
let api;
let why;

/** Open the dialog. of: the path of the federation's calls; overview: with the rights of this page's user; reason: reads
    from an answer why a call was refused. */
export function invite(of, overview, reason) {
  [api, why] = [of, reason];
  forget();
  const { enrolment_guarded: guarded, may_change: admin, makes_tokens: makes } = overview;
  $("invitation-title").textContent = $("invite").textContent;
  $("invitation-limits").hidden = !guarded || !makes;
  $("invitation-token").hidden = !guarded || makes;
  dialog.showModal();
  if (guarded) (makes ? limits.uses : token).focus();
  else if (admin) make("invitations", {});
  else make("join-link", { token: null });
}

async function make(path, wanted) {
  hide();
  const body = JSON.stringify({ server, ...wanted });
  const answer = await fetch(`${api}/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body }).catch(() => null);
  const problem = answer?.ok ? "" : answer ? await why(answer) : "The coordinator did not answer: try again.";
  const made = answer?.ok ? await answer.json().catch(() => null) : null;
  if (!dialog.open) return;
  if (!made) return complain(problem || "The coordinator's answer broke off: try again.");
  if (path === "join-link") return show(made);
  if (made.token) $("invitation-made").textContent = `For ${many(made.token.max_uses, "device")}, within ${seconds(until(made.token.expires_at))}.`;
  if (made.join_link) show(made.join_link);
  $("invitation-command").textContent = made.command;
  $("invitation-other").hidden = false;
}

function show({ link, svg, hints }) {
  $("invitation-text").value = link;
  $("invitation-code").src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  $("invitation-hints").replaceChildren(...hints.map((text) => element("li", { textContent: text })));
  $("invitation-link").hidden = false;
  $("invitation-text").focus({ preventScroll: true }); // or the code might be scrolled away
}

function complain(problem) {
  $("invitation-problem").textContent = problem;
  $("invitation-problem").hidden = false;
}

function hide() {
  for (const id of ["problem", "link", "other"]) $(`invitation-${id}`).hidden = true;
  for (const id of ["problem", "copied", "made", "command"]) $(`invitation-${id}`).textContent = "";
  $("invitation-text").value = "";
  $("invitation-code").removeAttribute("src");
}

function forget() {
  hide();
  token.value = limits.note.value = "";
}

$("invitation-token").addEventListener("submit", (event) => {
  event.preventDefault();
  make("join-link", { token: token.value.trim() });
});
$("invitation-limits").addEventListener("submit", (event) => {
  event.preventDefault();
  make("invitations", { uses: Number(limits.uses.value), seconds: Number(limits.seconds.value), note: limits.note.value });
});
$("invitation-text").addEventListener("focus", () => $("invitation-text").select());
copies($("invitation-copy"), $("invitation-text"), $("invitation-copied"));
copies($("invitation-command-copy"), $("invitation-command"), $("invitation-copied"));
dialog.addEventListener("close", forget);
