// What an administrator does to a federation.

import { call } from "./calls.js";
import { element } from "./charts.js";
import { bytes, many, percent, plain } from "./text.js";

const ACTIONS = {
  waiting: ["pause", "stop", "delete"], running: ["pause", "stop"], paused: ["resume", "stop"],
  finished: ["reopen", "delete"], stopped: ["reopen", "delete"],
};
const LABELS = { pause: "Pause", resume: "Resume", stop: "Stop", reopen: "Reopen", delete: "Delete" };
const DANGEROUS = ["stop", "delete"];
const $ = (id) => document.getElementById(id);
const form = $("settings");
const PIN_SECONDS = 60; // half of the time that a pin lasts

let api;
let federation;
let best; // the stored model with the best evaluation
let around; // { leave, come }: what to do before it is deleted, and where that fails

/** Begin. of: the path of the federation's calls; leave and come: end the stream, begin it again. */
export function begin(of, leave, come) {
  [api, around] = [of, { leave, come }];
}

export function show(now, may) {
  const moved = now.model_version !== federation?.model_version || now.rollback_version !== federation?.rollback_version;
  federation = now;
  $("admin").hidden = $("actions").hidden = !may;
  if (!may) return;
  const actions = ACTIONS[federation.status];
  if ($("actions").dataset.of !== actions.join()) {
    $("actions").dataset.of = actions.join();
    const focused = $("actions").contains(document.activeElement);
    $("actions").replaceChildren(...actions.map((action) => {
      const className = DANGEROUS.includes(action) ? "danger" : "";
      const button = element("button", { type: "button", className, textContent: LABELS[action] });
      button.addEventListener("click", () => act(action));
      return button;
    }));
    if (focused) $("actions").firstElementChild.focus();
  }
  for (const field of form.querySelectorAll("input"))
    if (!field.dataset.touched) field.value = federation.settings[field.name];
  if (moved && $("models").open) showModels();
}

async function remove() {
  const whole = `${many(federation.devices, "device")}, ${many(federation.round, "round")} and all its models`;
  if (!(await sure(`Delete ${federation.name} for good, with ${whole}?`, "Delete"))) return;
  around.leave(); // or its end would be told as an error
  if (await change("actions-problem", "DELETE")) location.replace(location.pathname); // to the newest of the others
  else around.come();
}

async function act(action) {
  if (action === "delete") return remove();
  const wanted = { action };
  if (action === "stop" && !(await sure(`Stop ${federation.name}? Its devices export what they have and leave.`, "Stop"))) return;
  const field = form.elements.rounds;
  if (action === "reopen" && Number(field.value) > federation.rounds) wanted.rounds = Number(field.value);
  if (!(await change("actions-problem", "PATCH", wanted))) return;
  if (wanted.rounds) delete field.dataset.touched;
  said("done", `${LABELS[action]}: done.`);
}

form.addEventListener("input", (event) => { event.target.dataset.touched = "yes"; });
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  // Only what was typed: the rest may have been changed by somebody else meanwhile.
  const fields = [...event.currentTarget.elements].filter((field) => field.dataset.touched);
  if (!fields.length) return said("saved", "Nothing was changed.");
  const given = ({ name, type, value }) => [name, type === "number" ? Number(value) : value.trim()];
  if (!(await change("settings-problem", "PATCH", Object.fromEntries(fields.map(given))))) return;
  for (const field of fields) delete field.dataset.touched;
  said("saved", "Saved.");
});

function change(where, method, body) {
  said("done", "");
  said("saved", "");
  return call(method, api, { body, where });
}

function said(id, text) {
  $(id).textContent = text;
}

// --- global models ----------------------------------------------------------------------------------------------------

$("models").addEventListener("toggle", () => $("models").open && showModels());

async function showModels() {
  const answer = await call("GET", `${api}/models`, { where: "models-problem" });
  if (!answer) return;
  const cell = (label, children) => {
    const made = element("td", {}, [element("span", {}, children)]);
    made.dataset.label = label;
    return made;
  };
  const models = (await answer.json()).reverse();
  best = models.find((model) => model.best);
  $("models-best").hidden = !best || best.current;
  $("models-best").textContent = best ? `Go back to the best: model ${best.version}, ${quality(best)}` : "";
  const rows = models.map((model) => {
    const back = element("button", { type: "button", textContent: "Go back", value: model.version, ariaLabel: `Go back to model ${model.version}`, disabled: model.current });
    back.addEventListener("click", () => goBack(model));
    return element("tr", {}, [
      element("th", { scope: "row", textContent: `Model ${model.version}` }),
      cell("Round", [model.round == null ? "unknown" : String(model.round)]), cell("Evaluated", [quality(model)]), cell("Size", [bytes(model.bytes)]),
      cell("State", [["current", "undone", "best"].filter((word) => model[word]).join(", ") || "kept"]), cell("Go back", [back]),
    ]);
  });
  const body = $("models-table").tBodies[0];
  const focused = body.contains(document.activeElement) && document.activeElement.value;
  body.replaceChildren(...rows);
  if (focused) body.querySelector(`button[value="${focused}"]`)?.focus();
}

/** Return the mean evaluation of a model after its round. */
function quality({ accuracy, loss }) {
  if (accuracy != null) return percent(accuracy);
  return loss == null ? "not evaluated" : `loss ${plain(loss)}`;
}

$("models-best").addEventListener("click", () => goBack(best));

/** Ask, and go back. The coordinator keeps the model while its user decides. */
async function goBack({ version, round }) {
  const pin = () => call("PUT", `${api}/models/${version}/pin`, { where: "models-problem" });
  if (!(await pin())) return;
  const pinning = setInterval(pin, PIN_SECONDS * 1000);
  const agreed = await sure(`Go back to model ${version}, of round ${round ?? "?"}? What was learnt since is left out of the global model.`, "Go back", false);
  clearInterval(pinning);
  if (!agreed) return;
  const body = { action: "rollback", model_version: version };
  if (await call("PATCH", api, { body, where: "models-problem" })) await showModels();
}

// --- asking -----------------------------------------------------------------------------------------------------------

/** Whether its user is sure. What is safe has the focus. danger: what is done cannot be undone. */
export function sure(question, yes, danger = true) {
  const dialog = $("ask");
  $("question").textContent = question;
  $("yes").textContent = yes;
  $("yes").classList.toggle("danger", danger);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
