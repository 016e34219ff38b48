// The dialog that creates a federation of a built-in task.

import { call, mended } from "./calls.js";
import { element } from "./charts.js";

const $ = (id) => document.getElementById(id);
const form = $("create-form");
const { task, method, min_devices: least, cohort, secure, secure_colluders: colluders } = form.elements;
let choices;

/** Open the dialog, and load the tasks and methods once. */
export async function create() {
  mended("create-problem");
  $("create").showModal();
  if (choices) return;
  const answer = await call("GET", "v1/settings", { where: "create-problem" });
  choices = await answer?.json();
  if (!choices) return;
  task.replaceChildren(...choices.tasks.map((name) => option(name, name === "digits")));
  method.replaceChildren(...choices.methods.map(({ name }) => option(name, name === "fedspu")));
  task.disabled = method.disabled = $("create-yes").disabled = false;
  adapt();
}

const option = (name, selected) => element("option", { value: name, textContent: name, selected });

/** Offer only methods that can be secure, and show the numbers that the coordinator would choose for those not given. */
async function adapt() {
  colluders.disabled = !secure.checked;
  const hint = secure.checked ? ", each of at least c + 2 devices, so that it and c colluding devices learn no single one" : "";
  $("secure-hint").textContent = `The coordinator sees only sums of updates${hint}.`;
  for (const { name, secure: can } of choices?.methods ?? [])
    [...method.options].find(({ value }) => value === name).disabled = secure.checked && !can;
  if (method.selectedOptions[0]?.disabled) method.value = "fedspu";
  if (!method.value) return;
  const answer = await call("POST", "v1/settings", { body: given(), where: "create-problem" });
  const settings = await answer?.json();
  if (settings) for (const field of [least, cohort]) field.value = settings[field.name];
}

/** The settings that its user has chosen. */
function given() {
  const settings = { method: method.value, rounds: Number(form.elements.rounds.value) };
  if (secure.checked) Object.assign(settings, { secure: true, secure_colluders: Number(colluders.value) });
  for (const name of ["operator", "purpose"]) settings[name] = form.elements[name].value.trim();
  for (const field of [least, cohort]) if (field.dataset.touched) settings[field.name] = Number(field.value);
  return settings;
}

for (const field of [least, cohort]) field.addEventListener("input", () => { field.dataset.touched = "yes"; });
for (const field of [secure, colluders]) field.addEventListener("change", adapt);
$("create-no").addEventListener("click", () => $("create").close());
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = form.elements.name.value;
  const body = { name, task: task.value, settings: given() };
  if (await call("POST", "v1/federations", { body, where: "create-problem" }))
    location.search = new URLSearchParams({ federation: name });
});
