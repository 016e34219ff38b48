// What an administrator does to a federation.

import { call } from "./calls.js";
import { element } from "./charts.js";
import { many } from "./text.js";

const ACTIONS = {
  waiting: ["pause", "stop", "delete"], running: ["pause", "stop"], paused: ["resume", "stop"],
  finished: ["reopen", "delete"], stopped: ["reopen", "delete"],
};
const LABELS = { pause: "Pause", resume: "Resume", stop: "Stop", reopen: "Reopen", delete: "Delete" };
const $ = (id) => document.getElementById(id);
const form = $("settings");

let api;
let federation;
let around; // { leave, come }: what to do before it is deleted, and where that fails

/** Begin. of: the path of the federation's calls; leave and come: end the stream, begin it again. */
export function begin(of, leave, come) {
  [api, around] = [of, { leave, come }];
}

export function show(now, may) {
  federation = now;
  $("admin").hidden = $("actions").hidden = !may;
  if (!may) return;
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
    const field = form.elements[key];
    if (!field.dataset.touched) field.value = value;
  }
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
  if (!(await change("settings-problem", "PATCH", Object.fromEntries(fields.map((field) => [field.name, Number(field.value)]))))) return;
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

/** Whether its user is sure. What is safe has the focus. */
export function sure(question, yes) {
  const dialog = $("ask");
  $("question").textContent = question;
  $("yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
