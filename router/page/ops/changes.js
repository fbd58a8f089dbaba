/**
 * What happened between two polls, as events with their reasons. Pure.
 *
 * An event is {kind, text}, or {kind, number, noun, rest} for what is counted. Kinds: good (something came up), note (a change
 * that somebody wanted), bad (something was lost).
 */

import { countsAs, growths, roleInWords } from "./figures.js";

/**
 * @param {object} before a poll (see figures.js)
 * @param {object} after the next one
 * @returns {object[]} events, in the order in which one would tell them
 */
export function changesBetween(before, after) {
  return [decisions, ofRollout, wishes, ofWorkers, ofRequests].flatMap((changes) => changes(before, after));
}

/** What the autoscaler has decided since, the oldest first. */
function decisions(before, after) {
  const latest = before.autoscaler?.decisions[0]?.at ?? 0;
  const fresh = (after.autoscaler?.decisions ?? []).filter((each) => each.at > latest).reverse();
  const said = fresh.map((each) => note(`autoscaler: ${each.reason}`));
  const { paused, problem } = after.autoscaler ?? {};
  if (problem && problem !== before.autoscaler?.problem) said.push(bad(`autoscaler: ${problem}`));
  if ((before.autoscaler?.paused ?? null) === (paused ?? null)) return said;
  return [...said, note(paused ? `autoscaler: paused, ${paused}` : "autoscaler: goes on")];
}

/** Each phase of a rollout once, with what is known of the new workers then. */
function ofRollout(before, after) {
  const [old, now] = [before.rollout, after.rollout];
  if (!now || (old && old.revision === now.revision && old.phase === now.phase)) return [];
  const what = old?.revision === now.revision ? "" : ` (${now.changes.join(", ")})`;
  const text = `rollout of revision ${now.revision}${what}: ${now.phase.replaceAll("_", " ")}; ${now.reason ?? now.verdict}`;
  return [{ kind: now.reason ? "bad" : "note", text }];
}

function wishes(before, after) {
  const roles = Object.keys(after.wanted).filter((role) => (before.wanted[role] ?? after.wanted[role]) !== after.wanted[role]);
  const wished = roles.map((role) => note(`${role}: ${plural(after.wanted[role], "worker")} wanted, before ${before.wanted[role]}`));
  return before.routers === after.routers ? wished : [...wished, note(`${plural(after.routers, "router")} wanted`)];
}

function ofWorkers(before, after) {
  const old = new Map(before.workers.map((worker) => [worker.worker_id, worker]));
  const now = new Set(after.workers.map((worker) => worker.worker_id));
  const changes = after.workers.map((worker) => {
    return changeOf(old.get(worker.worker_id), worker, fewerWanted(before, after, countsAs(worker.role)));
  });
  const gone = before.workers.filter((worker) => !now.has(worker.worker_id));
  return [...changes.filter(Boolean), ...gone.map((worker) => note(`${worker.worker_id} is gone; it was ${worker.state}`))];
}

function changeOf(old, worker, reason) {
  const name = worker.worker_id;
  if (!old && worker.state === "standby") return note(`${name} is new, and on standby`);
  if (!old) return worker.state === "ready" ? good(`${name} is new and ready`) : note(`${name} starts${lives(worker)}`);
  if (old.epoch !== worker.epoch) {
    const next = `epoch ${worker.epoch} ${{ ready: "is ready", standby: "is on standby" }[worker.state] ?? "starts"}`;
    if (old.state === "draining") return note(`${name} was drained; ${next}`);
    return bad(`${name} ended: ${worker.last_error ?? "no reason is known"}; ${next}${lives(worker)}`);
  }
  if (old.state !== worker.state && worker.state === "standby") return note(`${name} is on standby`); // it counts as decode's then
  if (old.role !== worker.role) return note(`${name} is ${roleInWords(worker.role)} now, and was ${roleInWords(old.role)}`);
  if (old.state !== worker.state) return stateChange(name, worker, reason);
  if (worker.state === "ready" && old.linked && !worker.linked) return bad(`${name}: the router lost its link to it`);
  if (worker.state === "ready" && !old.linked && worker.linked) return good(`${name} is in reach of the router`);
  return null;
}

function stateChange(name, worker, reason) {
  if (worker.state === "ready") return good(`${name} is ready, epoch ${worker.epoch}`);
  if (worker.state === "draining") return note(`${name} drains${reason}`);
  return note(`${name} starts`);
}

function fewerWanted(before, after, role) {
  const wanted = after.wanted[role];
  return wanted < before.wanted[role] ? `: ${plural(wanted, "worker")} of its role ${wanted === 1 ? "is" : "are"} wanted` : "";
}

function lives(worker) {
  if (worker.quick_ends < 2) return "";
  return `; it ended soon ${worker.quick_ends} times in a row and waits ${worker.start_delay_s} s before it starts`;
}

function ofRequests(before, after) {
  const failed = growths(before, after, "tandem:request_errors_total").filter(([code]) => code !== "cancelled");
  const moved = growths(before, after, "tandem:migrations_total");
  const resumed = growths(before, after, "tandem:resumed_streams_total");
  return [
    ...failed.map(([code, number]) => ({ kind: "bad", number, noun: "request", rest: ` failed: ${code}` })),
    ...moved.map(([labels, number]) => ({ kind: "note", number, noun: "stream", rest: ofMoves(labels) })),
    ...resumed.map(([, number]) => ({ kind: "note", number, noun: "stream", rest: " resumed elsewhere, or for its client" })),
  ];
}

/** `labels` are an outcome and a reason: "moved drain". */
function ofMoves(labels) {
  const [outcome, reason] = labels.split(" ");
  const why = { drain: "since a worker drains", flip: "since a worker has flipped" }[reason] ?? "to balance the load";
  return ` ${outcome === "moved" ? "moved" : `not moved (${outcome})`}, ${why}`;
}

function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function good(text) {
  return { kind: "good", text };
}

function note(text) {
  return { kind: "note", text };
}

function bad(text) {
  return { kind: "bad", text };
}
