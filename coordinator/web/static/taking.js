// "Take part": joining, progress, results, and leaving.

import { lacking } from "./capabilities.js";
import { Conditions, screen } from "./conditions.js";
import { askToPersist, forgetPage } from "./offline.js";
import { $, bytes, element, many, milliseconds, percent, put, seconds, show } from "./words.js";

const WORDS = {
  opening: "opening", ready: "ready", joining: "joining", waiting: "waiting", downloading: "downloading",
  training: "training", uploading: "uploading", evaluating: "checking", paused: "paused", left: "left",
  finished: "finished", failed: "failed",
};
const TAKING = new Set(["joining", "waiting", "downloading", "training", "uploading", "evaluating", "paused"]);
const CONDITIONS = ["charging", "unmetered", "front"];
const CANNOT_TELL = "this browser cannot check this";
const PROMISES = { charging: "the device is charging", unmetered: "the connection is not metered" };

/** The section in which a person takes part. */
export class Taking {
  #pausedByUser = false;
  #sent = null; // the reason to pause that the worker knows

  /**
   * @param {object} told
   * @param {(message: object) => void} told.send to the worker
   * @param {(question: object) => Promise<boolean>} told.ask a question with two answers
   */
  constructor({ send, ask }) {
    this.send = send;
    this.ask = ask;
    this.state = null;
    this.promised = new Set(); // conditions that the user confirmed, because the browser cannot check them
    this.conditions = new Conditions(() => this.#conditionsChanged());
    this.conditions.ready.then(() => this.#showConditions());
    $("name").value = newName();
    $("join").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#join();
    });
    for (const id of CONDITIONS) $(id).addEventListener("change", () => this.#conditionsChanged());
    $("pause").addEventListener("click", () => this.#pause());
    $("leave").addEventListener("click", () => this.#stop("leave"));
    $("forget").addEventListener("click", () => this.forget());
  }

  /** Draw a state of the worker. */
  draw(state) {
    this.state = state;
    const { phase, detail, federation, device, samples, lastFailure } = state;
    const taking = TAKING.has(phase);
    put($("phase"), WORDS[phase]);
    $("phase").dataset.phase = phase;
    screen.keepOn("training", taking && phase !== "paused");
    $("part").hidden = federation === null || phase === "opening";
    if (federation === null) return;
    this.#say(phase, detail);
    show($("last-failure"), lastFailure && `Last failure: ${lastFailure}`);
    this.#form(taking, phase, federation, device, samples);
    $("work").hidden = !taking && state.rounds === 0 && phase !== "finished";
    $("controls").hidden = !taking;
    put($("pause"), this.#pausedByUser ? "Continue" : "Pause");
    $("forget").hidden = !device?.enrolled && samples.source === "none" && state.rounds === 0;
    this.#progress(state, taking);
    this.#accuracy(state);
    tiles($("cost"), costs(state));
    this.#conditionsChanged();
  }

  /** Show the sentence; announce it to screen readers only if more than a number in it changed. */
  #say(phase, detail) {
    put($("detail"), detail);
    const gist = phase + detail.replace(/[\d.,]+/g, "");
    if (gist !== this.gist) put($("announced"), detail);
    this.gist = gist;
  }

  #form(taking, phase, federation, device, samples) {
    const held = $("join").contains(document.activeElement) || $("controls").contains(document.activeElement);
    const shown = !taking && phase !== "finished";
    const changes = shown === $("join").hidden;
    $("join").hidden = !shown;
    if (changes && held) $("detail").focus();
    if (device?.enrolled) [$("name").value, $("name").readOnly] = [device.name, true];
    else $("name").readOnly = false;
    $("budget-box").hidden = federation.method !== "fedspu";
    const lacks = lacking(federation);
    show($("lacking"), lacks);
    put($("consent"), consentOf(federation));
    $("take-part").disabled = lacks !== null || !samples.enough;
    put($("take-part"), device?.enrolled ? "Continue" : "Take part");
    put($("first"), samples.enough ? "" : `First: ${samples.lacks}`);
  }

  #progress({ work, federation, offline }, taking) {
    $("step-box").hidden = !taking || offline; // the round is then unknown
    $("step").hidden = !work?.steps;
    $("step").max = work?.steps || 1;
    $("step").value = work?.steps ? work.step : 0;
    put($("round"), `Round ${work?.round ?? federation.round} of ${federation.rounds}`);
    const loss = Number.isFinite(work?.loss) ? `, loss ${work.loss.toFixed(3)}` : "";
    put($("steps"), work?.steps ? `step ${work.step} of ${work.steps}${loss}` : "");
  }

  #accuracy({ accuracyBefore, accuracyNow, accuracyGlobal, judged, history }) {
    const rows = [
      ["at first", accuracyBefore, judged.before], ["now", accuracyNow, judged.now],
      ["the shared model", accuracyGlobal, judged.global],
    ];
    const known = rows.filter(([, share]) => share !== null && share !== undefined);
    $("answers").hidden = known.length === 0;
    tiles($("accuracy"), known.map(([label, share, count]) => [label, percent(share), rightOf(share, count)]));
    drawHistory($("history"), history.filter(({ accuracy }) => accuracy !== null));
  }

  async #join() {
    const { canTell, wanted } = this.conditions;
    const open = Object.keys(PROMISES).filter((key) => wanted[key] && !canTell[key] && !this.promised.has(key));
    if (open.length > 0) {
      const sure = await this.ask({
        question: "May this device train now?",
        consequence: `This browser cannot check whether ${open.map((key) => PROMISES[key]).join(" and whether ")}. ` +
          "Take part only if so, and pause when that changes. You are asked only once.",
        no: "Not yet", yes: "Yes, take part",
      });
      if (!sure) return;
      for (const key of open) this.promised.add(key);
    }
    askToPersist();
    if (this.#sent !== null) this.send({ do: "resume" });
    [this.#pausedByUser, this.#sent] = [false, null];
    const budget = $("budget-box").hidden ? 1 : Number($("budget").value);
    this.send({ do: "join", name: $("name").value, budget });
  }

  #pause() {
    this.#pausedByUser = !this.#pausedByUser;
    put($("pause"), this.#pausedByUser ? "Continue" : "Pause");
    this.#conditionsChanged();
  }

  #stop(how) {
    this.#pausedByUser = false;
    this.send({ do: how });
  }

  /** Ask whether to forget this device; if so, forget it. */
  async forget() {
    const sure = await this.ask({
      question: "Forget this device?",
      consequence: "This deletes your samples and the personal model from this browser, and this device with its " +
        "token at the coordinator. They cannot be restored. The records of its rounds keep its name, and the shared " +
        "model keeps what it has learned.",
      no: "Keep everything", yes: "Forget me",
    });
    if (!sure) return;
    this.#stop("forget");
    await forgetPage();
  }

  #showConditions() {
    const { canTell } = this.conditions;
    put($("charging-hint"), canTell.charging ? "" : CANNOT_TELL);
    put($("unmetered-hint"), canTell.unmetered ? "" : CANNOT_TELL);
    $("unmetered").checked = canTell.unmetered;
    this.#conditionsChanged();
  }

  #conditionsChanged() {
    for (const key of CONDITIONS) this.conditions.wanted[key] = $(key).checked;
    if (!TAKING.has(this.state?.phase)) return;
    const reason = this.#pausedByUser ? "user" : this.conditions.reason;
    if (reason === this.#sent) return;
    this.#sent = reason;
    this.send(reason === null ? { do: "resume" } : { do: "pause", reason });
  }
}

/** Who runs a federation, for what purpose, what the operator sees, and until when. */
function consentOf({ operator, purpose, rounds }) {
  const runs = `Run by ${operator || `the operator of ${location.host}`}`;
  const why = purpose ? `, for this purpose: ${purpose.replace(/\.$/, "")}.` : ", who gave no purpose.";
  return `${runs}${why} The operator sees this device's name, model changes, results and costs, not your samples, until ` +
    `round ${rounds} ends or you leave; records stay until the operator deletes the federation.`;
}

/** A name for a new device, such as "phone-7k3f". */
function newName() {
  const { userAgent, maxTouchPoints } = navigator;
  const isTablet = /iPad|Tablet/.test(userAgent) || (/Macintosh/.test(userAgent) && maxTouchPoints > 1) ||
    (/Android/.test(userAgent) && !/Mobile/.test(userAgent));
  const kind = isTablet ? "tablet" : /Mobi|Android|iPhone/.test(userAgent) ? "phone" : "computer";
  const letters = "23456789abcdefghjkmnpqrstuvwxyz"; // without characters that look alike
  const random = Array.from(crypto.getRandomValues(new Uint8Array(4)), (byte) => letters[byte % letters.length]);
  return `${kind}-${random.join("")}`;
}

/** 0.667 of 3 samples -> "2 of 3 right"; nothing if the number of samples is unknown. */
const rightOf = (share, count) => (count ? `${Math.round(count * share)} of ${count} right` : "");

function costs({ rounds, bytesDown, bytesUp, secondsTraining, stepMilliseconds, steps }) {
  return [
    ["took part in", many(rounds, "round"), ""],
    ["received", bytes(bytesDown), ""],
    ["sent", bytes(bytesUp), ""],
    ["training", seconds(secondsTraining), many(steps, "step")],
    ["one step", stepMilliseconds === null ? "unknown yet" : milliseconds(stepMilliseconds), ""],
  ];
}

/** Show [label, value, more] as tiles; update only texts that changed. */
function tiles(list, rows) {
  while (list.children.length > rows.length) list.lastElementChild.remove();
  rows.forEach(([label, value, more], index) => {
    if (!list.children[index]) {
      list.append(element("div", {}, element("dt"), element("dd", {}, element("span"), element("small"))));
    }
    const [term, [text, small]] = [list.children[index].firstChild, list.children[index].lastChild.children];
    put(term, label);
    put(text, value);
    show(small, more);
  });
}

/** Draw accuracy by round as a line. */
function drawHistory(svg, points) {
  svg.toggleAttribute("hidden", points.length < 2);
  if (points.length < 2) return;
  const [first, last] = [points[0], points.at(-1)];
  const [wide, high, edge] = [300, 60, 6];
  const x = ({ round }) => edge + ((wide - 2 * edge) * (round - first.round)) / (last.round - first.round || 1);
  const y = ({ accuracy }) => high - edge - (high - 2 * edge) * accuracy;
  const line =
    svg.firstElementChild ?? svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  line.setAttribute("points", points.map((point) => `${x(point).toFixed(1)},${y(point).toFixed(1)}`).join(" "));
  svg.setAttribute("aria-label", `Right answers by round: ${percent(first.accuracy)} in round ${first.round}, ` +
    `${percent(last.accuracy)} in round ${last.round}`);
}
