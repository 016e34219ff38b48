// The page of a device: it shows the worker's state and sends the user's commands to the worker.

import { Giving } from "./give.js";
import { keepPage } from "./offline.js";
import { Taking } from "./taking.js";
import { Trial } from "./trial.js";
import { $, element, put, show } from "./words.js";

const federation = decodeURIComponent(location.pathname.replace(/\/+$/, "").split("/").pop());
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const questions = new Map(); // id -> the functions that settle its promise
let link = takeLink();
let phase = "opening";

/**
 * Return the address's enrolment token and publisher's fingerprint, and remove them from the address: a token must not
 * stay in the browser's history. null for an address without either.
 */
function takeLink() {
  const said = new URLSearchParams(location.hash.slice(1)), [token, publisher] = [said.get("token"), said.get("publisher")];
  if (token === null && publisher === null) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return { token, publisher };
}

const send = (message, transfer = []) => worker.postMessage(message, transfer);

/** Return the worker's answer to a command. Throws Error if the worker refuses it. */
function request(message) {
  const id = crypto.getRandomValues(new Uint32Array(1))[0];
  return new Promise((resolve, reject) => {
    questions.set(id, { resolve, reject });
    send({ ...message, id });
  });
}

/** Ask the user; returns whether the answer is `yes`. Escape is `no`, which also has the focus at first. */
function ask({ question, consequence, no, yes }) {
  put($("question"), question);
  put($("consequence"), consequence);
  put($("no"), no);
  put($("yes"), yes);
  $("ask").returnValue = "no";
  $("ask").showModal();
  $("no").focus();
  return new Promise((resolve) => {
    $("ask").onclose = () => {
      // The close event of an earlier question may arrive late.
      if ($("ask").open) return;
      resolve($("ask").returnValue === "yes");
    };
  });
}

const giving = new Giving({ send, request, ask });
const taking = new Taking({ send, ask });
const trial = new Trial({ request });

function draw(state) {
  phase = state.phase;
  const lost = phase === "failed" && state.federation === null;
  show($("problem"), lost ? state.detail : "");
  show($("opening"), phase === "opening" ? state.detail : "");
  $("retry").hidden = !lost;
  $("start-anew").hidden = !(lost && state.kept);
  $("insecure").hidden = state.secure;
  $("away").hidden = !state.offline || phase === "failed";
  show($("remains"), state.remains);
  put($("signed"), state.signed ? `Model: ${state.signed}` : "\u00a0"); // keeps its line
  giving.draw(state);
  taking.draw(state);
  trial.draw(state);
}

function answer({ say, id, detail, state, ...rest }) {
  if (say === "state") return draw(state);
  const waiting = questions.get(id);
  questions.delete(id);
  if (say !== "refused") return waiting?.resolve(rest);
  if (waiting) waiting.reject(new Error(detail));
  else giving.fail(detail);
}

function open() {
  show($("problem"), "");
  send({ do: "open", federation, token: null, publisher: null, ...link });
}

worker.addEventListener("message", ({ data }) => answer(data));
worker.addEventListener("error", (event) => {
  event.preventDefault();
  show($("problem"), `This browser could not start training (${event.message || "its worker did not load"}). ` +
    "Reload the page, or use another recent browser.");
});
addEventListener("hashchange", () => {
  const found = takeLink();
  if (found === null) return;
  link = found;
  if (["opening", "ready", "left", "failed"].includes(phase)) open();
});
$("retry").addEventListener("click", open);
$("start-anew").addEventListener("click", () => taking.forget());
put($("title"), `Train ${federation} with this device`);
document.title = `${federation} - Sparrow`;
document.head.append(element("link", { rel: "manifest", href: `${encodeURIComponent(federation)}/app.webmanifest` }));
keepPage();
open();
