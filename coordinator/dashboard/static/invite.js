// The dialog with the link that makes a phone a device of this federation. The coordinator makes link and QR code, and
// keeps neither; here both are gone with the dialog, as is the token.

import { element } from "./charts.js";

const $ = (id) => document.getElementById(id);
const dialog = $("invitation");
const token = $("invitation-token").elements.token;
const server = new URL(".", location.href).href; // as this page was called, a proxy's path included
let path;
let why;

/** Open the dialog. link: the call that makes a link; guarded: whether devices need a token to join; reason: reads from
    an answer why a call was refused. */
export function invite(link, guarded, reason) {
  [path, why] = [link, reason];
  forget();
  $("invitation-token").hidden = !guarded;
  dialog.showModal();
  if (guarded) token.focus();
  else make(null);
}

async function make(secret) {
  hide();
  const body = JSON.stringify({ server, token: secret });
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body }).catch(() => null);
  const problem = answer?.ok ? "" : answer ? await why(answer) : "The coordinator did not answer: try again.";
  const made = answer?.ok ? await answer.json().catch(() => null) : null;
  if (!dialog.open) return;
  if (made) show(made);
  else complain(problem || "The coordinator's answer broke off: try again.");
}

function show({ link, svg, hints }) {
  $("invitation-text").value = link;
  $("invitation-code").src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  $("invitation-hints").replaceChildren(...hints.map((text) => element("li", { textContent: text })));
  $("invitation-copy").hidden = !navigator.clipboard; // which browsers have over HTTPS and on this machine
  $("invitation-link").hidden = false;
  $("invitation-text").focus({ preventScroll: true }); // or the code might be scrolled away
}

function complain(problem) {
  $("invitation-problem").textContent = problem;
  $("invitation-problem").hidden = false;
}

function hide() {
  $("invitation-problem").hidden = $("invitation-link").hidden = true;
  $("invitation-problem").textContent = $("invitation-copied").textContent = $("invitation-text").value = "";
  $("invitation-code").removeAttribute("src");
}

function forget() {
  hide();
  token.value = "";
}

$("invitation-token").addEventListener("submit", (event) => {
  event.preventDefault();
  make(token.value.trim());
});
$("invitation-text").addEventListener("focus", () => $("invitation-text").select());
$("invitation-copy").addEventListener("click", async () => {
  const copied = await navigator.clipboard.writeText($("invitation-text").value).then(() => true, () => false);
  $("invitation-copied").textContent = copied ? "Copied." : "The browser did not allow it: select the link and copy it.";
  if (!copied) $("invitation-text").focus();
});
dialog.addEventListener("close", forget);
