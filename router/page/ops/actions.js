/**
 * What an operator can do here: scale, flip, drain, audit. Each has a dialog that asks first and then shows what came of it.
 *
 *   closed ── button ──► asking ── confirmed ──► under way ──► told, or refused ──► closed
 *                          └──── Cancel, Esc ────────────────────────────────────────▲
 *
 * Who leaves the dialog while the answer is under way finds it among the events.
 */

import { Failure } from "../api.js";
import { write } from "./elements.js";
import { roleInWords } from "./figures.js";

/** What so many of each are called. */
const SIZED = {
  prefill: (number) => (number === 1 ? "prefill worker" : "prefill workers"),
  decode: (number) => (number === 1 ? "decode worker" : "decode workers"),
  routers: (number) => (number === 1 ? "router" : "routers"),
};

/** One dialog. `order` does what was confirmed and says in words what came of it. */
class Action {
  #dialog;
  #submit;
  #leave;
  #outcome;
  #opened = 0; // how often

  constructor(id, order, tell) {
    this.#dialog = document.getElementById(id);
    this.form = this.#dialog.querySelector("form");
    const parts = ["[type=submit]", ".leave", ".outcome"];
    [this.#submit, this.#leave, this.#outcome] = parts.map((each) => this.form.querySelector(each));
    this.#leave.addEventListener("click", () => this.#dialog.close());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#run(order, tell);
    });
  }

  open() {
    this.#opened += 1;
    this.#show("", "");
    this.#enable(true);
    this.#submit.hidden = false;
    this.#leave.textContent = "Cancel";
    this.#dialog.showModal();
  }

  async #run(order, tell) {
    const opened = this.#opened;
    this.#enable(false);
    this.#show("Asking the cluster.", "");
    try {
      const { event, outcome } = await order();
      tell("note", event);
      if (opened !== this.#opened) return; // it asks about something else by now
      this.#show(outcome, "good");
      this.#submit.hidden = true;
      this.#leave.textContent = "Close";
      this.#leave.focus();
    } catch (error) {
      const said = error instanceof Failure ? error.message : `Something in this page broke: ${error}`;
      tell("bad", `${isRefusal(error) ? "refused" : "not known whether it was done"}: ${said}`);
      if (opened !== this.#opened) return;
      this.#show(said, "bad");
      this.#enable(true);
      this.#submit.focus();
    }
  }

  #enable(enabled) {
    for (const each of this.form.querySelectorAll("fieldset, [type=submit]")) each.disabled = !enabled;
  }

  #show(text, kind) {
    write(this.#outcome, text);
    this.#outcome.dataset.kind = kind;
  }
}

/** Whether nothing was done. An answer that is late, or is lost, says nothing of that. */
function isRefusal(error) {
  return error instanceof NothingToDo || (error.status >= 400 && error.status < 500);
}

/** What the operator confirmed is how things are already. */
class NothingToDo extends Failure {}

/**
 * All actions. Returns what opens the dialogs for one worker.
 * @param {object} cluster `poll()` is the latest poll; `get(path)` and `post(path, body)` throw Failure
 * @param {(kind: string, text: string) => void} tell notes an event
 * @returns {{drain: (worker: string) => void, flip: (worker: string, role: string) => void}}
 */
export function connectActions(cluster, tell) {
  connectScale(cluster, tell);
  const audit = new Action("audit", () => runAudit(cluster), tell);
  document.getElementById("audit-button").addEventListener("click", () => audit.open());
  return { drain: connectDrain(cluster, tell), flip: connectFlip(cluster, tell) };
}

function connectScale(cluster, tell) {
  const names = ["prefill", "decode", "routers"];
  const fields = new Map(names.map((name) => [name, document.getElementById(`scale-${name}`)]));
  let shown = {};
  const scale = new Action("scale", () => runScale(cluster, fields, shown), tell);
  document.getElementById("scale-button").addEventListener("click", () => {
    shown = sizesOf(cluster.poll());
    scale.open();
    for (const [name, field] of fields) {
      const there = name in shown;
      field.closest("[data-size]").hidden = !there;
      field.disabled = !there;
      field.value = shown[name] ?? "";
    }
  });
}

/** The numbers that are wanted now, of what can be scaled here: Ray Serve may size the routers itself. */
function sizesOf({ wanted, routers }) {
  return routers === null ? wanted : { ...wanted, routers };
}

/** Orders the numbers that differ from those that the dialog showed: others may have changed meanwhile. */
async function runScale(cluster, fields, shown) {
  const sizes = {};
  for (const [name, field] of fields) {
    if (name in shown && field.valueAsNumber !== shown[name]) sizes[name] = field.valueAsNumber;
  }
  const asked = Object.entries(sizes).map(([name, number]) => `${number} ${SIZED[name](number)}`).join(", ");
  if (!asked) throw new NothingToDo("No number was changed here.");
  await cluster.post("admin/scale", sizes);
  return { event: `asked here for ${asked}`, outcome: `The cluster is on its way to ${asked}.` };
}

function connectDrain(cluster, tell) {
  let worker = null;
  const drain = new Action("drain", () => runDrain(cluster, worker, drain.form.elements.then.value === "restart"), tell);
  return (name) => {
    worker = name;
    write(document.querySelector("#drain-heading span"), name);
    drain.form.reset();
    drain.open();
  };
}

function connectFlip(cluster, tell) {
  let worker = null;
  const flip = new Action("flip", () => runFlip(cluster, worker, flip.form.elements.to.value), tell);
  return (name, present) => {
    worker = name;
    write(document.querySelector("#flip-heading span"), name);
    const choices = [...flip.form.elements.to];
    for (const choice of choices) choice.closest("label").hidden = choice.value === present;
    choices.find((choice) => choice.value !== present).checked = true;
    flip.open();
  };
}

async function runFlip(cluster, worker, role) {
  await cluster.post("admin/flip", { worker_id: worker, role });
  return { event: `asked here to flip ${worker} to ${role}`, outcome: `${worker} is ${roleInWords(role)} now.` };
}

async function runDrain(cluster, worker, restart) {
  await cluster.post("admin/drain", { worker, restart });
  const then = restart ? "then it starts anew" : "then it ends";
  return { event: `asked here to drain ${worker}; ${then}`, outcome: `${worker} drains, ${then}.` };
}

async function runAudit(cluster) {
  const { leaks } = await cluster.get("admin/audit");
  const found = leaks.map((leak) => leak.message).join("\n");
  if (!found) return { event: "an audit found no leak", outcome: "No leak: all that workers hold is held for a request." };
  return { event: `an audit found ${found}`, outcome: `Held though no request needs it:\n${found}` };
}
