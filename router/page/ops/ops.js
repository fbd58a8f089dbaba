/**
 * The operators' page. It looks at the cluster once a second, with one look under way at a time:
 *
 *   looking ─┬─ answered ──────────► live, and looks again a second after it began
 *            ├─ no answer ─────────► away: the figures grow old, and it looks again
 *            └─ refused ───────────► waits for the operator's key, then looks again
 *
 * While the tab is hidden it does not look. The operator's key is kept in a variable of this module and nowhere else.
 */

import { Failure, jsonOf, request } from "../api.js";
import { connectActions } from "./actions.js";
import { changesBetween } from "./changes.js";
import { History } from "./charts.js";
import { write } from "./elements.js";
import { Events } from "./events.js";
import { LATENCY_S, Polls, RATE_S, busyFractions, pollOf, roleBusy, tokenRates } from "./figures.js";
import { Summary, TimeSpent } from "./panels.js";
import { Topology } from "./topology.js";

const PERIOD_MS = 1000;
const LOOK_DEADLINE_MS = 5000;
const ORDER_DEADLINE_MS = 60_000; // an audit asks every worker, three times if something looks wrong
const OLD_S = 3;
const LONGEST_PAUSE_S = 6; // between two looks, before what happened is no longer of just now
const PULSES = { connecting: "Connecting", live: "Live", away: "No answer", key: "Key needed", paused: "Paused" };

const [model, pulse, age, problem, keyForm, keyField, live, orders] = [
  "model", "pulse", "age", "problem", "key-form", "key", "live", "orders",
].map((id) => document.getElementById(id));

let key = null;
let useKey = () => {}; // takes the key, while somebody waits for it
let latest = null; // the latest poll
let away = null; // since when nobody has answered, in seconds

const polls = new Polls();
const events = new Events(document.getElementById("events"), document.getElementById("no-events"));
const summary = new Summary(document.getElementById("summary"));
const timeSpent = new TimeSpent(document.getElementById("stages"), document.querySelector("#latencies tbody"));
const charts = new History(document.getElementById("charts"));
const cluster = { poll: () => latest, get: ask, post: order };
const topology = new Topology(connectActions(cluster, (kind, text) => events.add(now(), { kind, text })));

async function watch() {
  for (;;) {
    await untilSeen();
    const next = performance.now() + PERIOD_MS;
    const poll = await look();
    if (poll) show(poll);
    await new Promise((resolve) => setTimeout(resolve, next - performance.now()));
  }
}

/** A poll, or null if there is none now. */
async function look() {
  try {
    const signal = AbortSignal.timeout(LOOK_DEADLINE_MS);
    const answers = await Promise.all([request("admin/status", key, { signal }), request("metrics", key, { signal })]);
    return pollOf(now(), await answers[0].json(), await answers[1].text());
  } catch (error) {
    if (error.status === 401 || error.status === 403) await askForKey(error);
    else noAnswer(error instanceof Failure ? error.message : `The answer broke off: ${error.message}`);
    return null;
  }
}

function show(poll) {
  if (away !== null) events.add(poll.at, { kind: "good", text: `answers again, after ${Math.round(poll.at - away)} s` });
  const changes = latest ? changesBetween(latest, poll) : [];
  const pause = changes.length && away === null ? Math.round(poll.at - latest.at) : 0;
  if (pause > LONGEST_PAUSE_S) events.add(poll.at, { kind: "note", text: `not looked for ${pause} s; what follows is of that time` });
  for (const event of changes) events.add(poll.at, event);
  [away, latest] = [null, poll];
  polls.add(poll);
  write(problem, "");
  live.hidden = orders.hidden = false;
  setPulse("live");
  write(model, poll.model ?? "");
  const [recent, longer] = [polls.before(RATE_S), polls.before(LATENCY_S)];
  const tokens = recent ? tokenRates(recent, poll) : { in: null, out: null };
  const [prefill, decode] = ["prefill", "decode"].map((role) => (recent ? roleBusy(recent, poll, role) : null));
  summary.show(poll, longer, tokens);
  topology.show(poll, recent ? busyFractions(recent, poll) : new Map());
  timeSpent.show(poll, longer);
  charts.add(poll.at, tokens, { prefill, decode });
}

function noAnswer(reason) {
  if (away === null) events.add(now(), { kind: "bad", text: `no answer: ${reason}` });
  away ??= now();
  setPulse("away");
  write(problem, reason);
}

/** Waits until somebody has given a key. */
async function askForKey(error) {
  // Without a key the form says all there is to say, unless a key would not help.
  write(problem, key || error.status === 403 ? error.message : "");
  key = null;
  setPulse("key");
  keyForm.hidden = false;
  keyField.focus();
  key = await new Promise((resolve) => (useKey = resolve));
  write(problem, "");
  keyForm.hidden = true;
}

async function ask(path) {
  return jsonOf(await request(path, key, { signal: AbortSignal.timeout(ORDER_DEADLINE_MS) }));
}

async function order(path, body) {
  const headers = { "content-type": "application/json" };
  const signal = AbortSignal.timeout(ORDER_DEADLINE_MS);
  return jsonOf(await request(path, key, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

function setPulse(state) {
  pulse.dataset.state = state;
  write(pulse, PULSES[state]);
  showAge();
}

/** How old the figures are, once that is worth saying. It is no live region: it changes every second. */
function showAge() {
  const old = latest && now() - latest.at > OLD_S;
  write(age, old ? `figures are ${Math.round(now() - latest.at)} s old` : "");
  live.classList.toggle("old", Boolean(old));
}

function untilSeen() {
  if (!document.hidden) return Promise.resolve();
  setPulse("paused");
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })).then(untilSeen);
}

function now() {
  return performance.now() / 1000;
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  // A header takes bytes; the key may have any character.
  useKey(String.fromCharCode(...new TextEncoder().encode(keyField.value)));
  keyField.value = "";
});
addEventListener("pagehide", () => {
  key = null; // a browser may keep the page for who comes back to it
  keyField.value = "";
});
setInterval(showAge, PERIOD_MS);
watch().catch((error) => {
  write(problem, `Something in this page broke: ${error}`);
  throw error;
});
