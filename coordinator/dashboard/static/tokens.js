// The dialog of operators' tokens: create, list, revoke. A new token's secret is shown once and is gone with the dialog.

import { call } from "./calls.js";
import { element } from "./charts.js";
import { copies } from "./copy.js";
import { many, seconds, until } from "./text.js";

const WHERE = "tokens-problem";
const $ = (id) => document.getElementById(id);
const dialog = $("tokens");
const form = $("tokens-form");

let sure; // asks before something is done for good

/** Open the dialog. overview: of the page, with the names of federations; confirm: asks its user. */
export async function open(overview, confirm) {
  sure = confirm;
  forget();
  const options = overview.federations.map(({ name }) => element("option", { value: name, textContent: name }));
  form.elements.federation.replaceChildren(element("option", { value: "", textContent: "all" }), ...options);
  fit();
  dialog.showModal();
  await list();
}

async function list() {
  const answer = await call("GET", "v1/tokens", { where: WHERE });
  if (!answer) return;
  const tokens = await answer.json();
  const valid = tokens.filter((token) => token.status === "valid");
  const over = tokens.filter((token) => token.status !== "valid");
  $("tokens-none").hidden = valid.length > 0;
  $("tokens-valid").replaceChildren(...(valid.length ? [table("Valid tokens", valid, tokens)] : []));
  $("tokens-over").hidden = !over.length;
  $("tokens-over-count").textContent = `${over.length} revoked, expired or used up`;
  $("tokens-old").replaceChildren(...(over.length ? [table("Other tokens", over, tokens)] : []));
}

/** A table of some tokens. all: those among which the tokens made with them are looked for. */
function table(ariaLabel, tokens, all) {
  const heads = ["Token", "Note", "For", "Devices", "Ends", "Made by", "Revoke"];
  return element("table", { className: "cards", ariaLabel }, [
    element("thead", {}, [element("tr", {}, heads.map((textContent) => element("th", { scope: "col", textContent })))]),
    element("tbody", {}, tokens.map((token) => element("tr", {}, [
      element("th", { scope: "row", textContent: `${token.kind} ${token.id}` }),
      ...[
        [token.note || "–"],
        [token.federation ?? "all federations"],
        [token.kind === "enrolment" ? `${token.uses} of ${token.max_uses ?? "any"}` : "–"],
        [token.status === "valid" ? (token.expires_at ? `in ${seconds(until(token.expires_at))}` : "never") : token.status],
        [token.made_by ?? "this machine's commands"],
        revoking(token, all),
      ].map((children, index) => {
        const cell = element("td", {}, [element("span", {}, children)]);
        cell.dataset.label = heads[index + 1];
        return cell;
      }),
    ]))),
  ]);
}

/** The buttons that revoke a token, and the valid tokens that were made with it. */
function revoking(token, all) {
  const made = madeWith(token.id, all);
  const button = (textContent, question, path) => {
    const found = element("button", { type: "button", className: "danger", textContent, ariaLabel: `${textContent} ${token.id}` });
    found.addEventListener("click", async () => {
      if ((await sure(question, "Revoke")) && (await call("DELETE", path, { where: WHERE }))) await list();
    });
    return found;
  };
  const path = `v1/tokens/${encodeURIComponent(token.id)}`;
  const whose = `the ${token.kind} token ${token.id}${token.note ? ` (${token.note})` : ""}`;
  return [
    ...(token.status === "revoked" ? [] : [button("Revoke", `Revoke ${whose} for good?`, path)]),
    ...(made ? [button(`Revoke with ${made} made`, `Revoke ${whose} and ${many(made, "token")} made with it for good?`, `${path}?made=true`)] : []),
  ];
}

function madeWith(id, all) {
  const made = all.filter((token) => token.made_by === id);
  return made.reduce((count, token) => count + (token.status === "valid") + madeWith(token.id, all), 0);
}

function forget() {
  $("tokens-made").hidden = true;
  $("tokens-secret").value = $("tokens-copied").textContent = form.elements.note.value = "";
}

/** Only an enrolment token has a number of devices, and an admin token is for all federations. */
function fit() {
  const { kind, uses, federation } = form.elements;
  uses.disabled = kind.value !== "enrolment";
  federation.disabled = kind.value === "admin";
}

form.elements.kind.addEventListener("change", fit);
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const { kind, note, federation, uses, seconds: lifetime } = Object.fromEntries(new FormData(form));
  const body = {
    kind, note, federation: federation || null, uses: uses ? Number(uses) : null, seconds: lifetime ? Number(lifetime) : null,
  };
  const answer = await call("POST", "v1/tokens", { body, where: WHERE });
  const made = await answer?.json();
  if (!made || !dialog.open) return;
  forget();
  $("tokens-made-title").textContent = `The new ${made.kind} token, shown only now`;
  $("tokens-secret").value = made.secret;
  $("tokens-made").hidden = false;
  $("tokens-secret").focus();
  await list();
});
$("tokens-secret").addEventListener("focus", () => $("tokens-secret").select());
copies($("tokens-copy"), $("tokens-secret"), $("tokens-copied"));
dialog.addEventListener("close", forget);
