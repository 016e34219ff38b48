// The page of a device: it draws what its worker says, and tells the worker what a person wants.

import { Giving } from "./give.js";
import { Taking } from "./taking.js";
import { Trial } from "./trial.js";
import { $, put, show } from "./words.js";

const federation = decodeURIComponent(location.pathname.replace(/\/+$/, "").split("/").pop());
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const questions = new Map(); // id -> how to answer the one who waits
let link = takeLink();
let phase = "opening";

/**
 * The enrolment token and the publisher's fingerprint of the address, which are removed from it at once: a token must not
 * lie in the browser's history. null for an address with neither.
 */
function takeLink() {
  const said = new URLSearchParams(location.hash.slice(1)), [token, publisher] = [said.get("token"), said.get("publisher")];
  if (token === null && publisher === null) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return { token, publisher };
}

const send = (message, transfer = []) => worker.postMessage(message, transfer);

/** Ask the worker: its answer, or an Error where it refused. */
function request(message) {
  const id = crypto.getRandomValues(new Uint32Array(1))[0];
  return new Promise((resolve, reject) => {
    questions.set(id, { resolve, reject });
    send({ ...message, id });
  });
}

/** Ask the person: true for the answer `yes`. Escape, and what has the focus at first, is `no`. */
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
      if ($("ask").open) return; // that an earlier question was closed is said late
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
  show($("problem"), `This browser could not start training (${event.message || "its worker did not load"}): ` +
    "reload the page, or try another browser that is up to date.");
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
open();
