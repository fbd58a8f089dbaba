/**
 * What follows from two polls of a cluster: rates, shares and quantiles. Pure: no page, no clock, no network.
 *
 * `tandem top` computes the same in cluster/commands/top/figures.py, and a test compares the two. Times are in seconds.
 * A figure is null where the polls do not tell it.
 */

/** Rates and busy fractions are of the last so many seconds. */
export const RATE_S = 3;
/** Latencies, stages and cache hits are of the last so many seconds. */
export const LATENCY_S = 30;
/** After a longer silence figures begin anew. */
const MOST_GAP_S = 6;

/** The stages of a request that ended, and the histogram of each. */
export const STAGES = {
  queue: "tandem:request_queue_time_seconds",
  prefill: "tandem:request_prefill_time_seconds",
  decode: "tandem:request_decode_time_seconds",
};
/** What a client notices. */
export const LATENCIES = {
  "First token": "tandem:time_to_first_token_seconds",
  "Between tokens": "tandem:inter_token_latency_seconds",
};
export const QUANTILES = [0.5, 0.9, 0.99];

const WAITING = "tandem:router_requests_waiting";
const TOKENS_IN = "tandem:prompt_tokens_total";
const TOKENS_OUT = "tandem:generation_tokens_total";
const KINDS = ["request_errors", "migrations", "resumed_streams", "workers_lost", "disaggregation_decisions"];
const KEPT = new Set([
  WAITING,
  TOKENS_IN,
  TOKENS_OUT,
  ...KINDS.map((kind) => `tandem:${kind}_total`),
  ...[STAGES, LATENCIES].flatMap(Object.values).flatMap((name) => ["sum", "count", "bucket"].map((part) => `${name}_${part}`)),
]);
const SUMMED = new Set(["model_name", "router"]);
const LABELS = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/**
 * The families of Prometheus' text that the page needs, each summed over the routers.
 * @param {string} text
 * @returns {{model: string | null, totals: Map<string, Map<string, number>>}} family to values by its other labels, which are
 *   joined in the order of their names: "moved drain" for outcome and reason
 */
export function readMetrics(text) {
  let model = null;
  const totals = new Map();
  for (const line of text.split("\n")) {
    const end = line.search(/[{ ]/);
    const name = line.slice(0, end);
    if (!KEPT.has(name)) continue;
    const found = line.slice(0, line.lastIndexOf("}")).matchAll(LABELS);
    const labels = [...found].map(([, label, value]) => [label, unescaped(value)]);
    model ??= labels.find(([label]) => label === "model_name")?.[1] ?? null;
    const rest = labels.filter(([label]) => !SUMMED.has(label)).sort().map(([, value]) => value);
    const value = Number(line.slice(line.lastIndexOf("}") + 1).trim().split(" ")[0]);
    const family = totals.get(name) ?? new Map();
    const series = rest.join(" ");
    family.set(series, (family.get(series) ?? 0) + value);
    totals.set(name, family);
  }
  return { model, totals };
}

function unescaped(value) {
  return value.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign));
}

/**
 * One look at the cluster. Its `routers` are how many there should be, null where Ray Serve sizes them.
 * @param {number} at seconds of any clock that only goes forward
 * @param {object} status answer of /admin/status
 * @param {string} metrics answer of /metrics
 */
export function pollOf(at, status, metrics) {
  const { workers, wanted, autoscaler, rollout } = status;
  const routers = status.routers?.wanted ?? null;
  return { at, workers, wanted, routers, autoscaler, rollout, ...readMetrics(metrics) };
}

/** The latest polls, as many as the figures need. */
export class Polls {
  #polls = [];

  add(poll) {
    if (this.latest && poll.at - this.latest.at > MOST_GAP_S) this.#polls = [];
    this.#polls.push(poll);
    while (this.#polls.length > 2 && poll.at - this.#polls[1].at >= LATENCY_S) this.#polls.shift();
  }

  get latest() {
    return this.#polls.at(-1) ?? null;
  }

  /** The poll that is so much older than the latest one, or the oldest one; null while there is but one. */
  before(seconds) {
    const earlier = this.#polls.slice(0, -1);
    return earlier.findLast((poll) => this.latest.at - poll.at >= seconds) ?? earlier[0] ?? null;
  }
}

/** What a counter has grown by, over all its labels or for one of them. A counter that began anew has not grown. */
export function growth(before, after, name, series = null) {
  const [old, now] = [before, after].map((poll) => total(poll, name, series));
  return Math.max(0, now - old);
}

function total(poll, name, series = null) {
  const family = poll.totals.get(name) ?? new Map();
  return series === null ? [...family.values()].reduce(sum, 0) : (family.get(series) ?? 0);
}

/** The labels of a family that its counts grew under, and by how much: `[["overloaded", 3]]`. */
export function growths(before, after, name) {
  const labels = [...(after.totals.get(name)?.keys() ?? [])];
  return labels.map((label) => [label, growth(before, after, name, label)]).filter(([, grown]) => grown > 0);
}

/** Prompt tokens and answer tokens a second. */
export function tokenRates(before, after) {
  const [tokensIn, tokensOut] = [TOKENS_IN, TOKENS_OUT].map((name) => growth(before, after, name) / (after.at - before.at));
  return { in: tokensIn, out: tokensOut };
}

/**
 * The share of the time between the polls in which each worker's engine computed, from 0 to 1. A step that is under way counts
 * for as long as it has lasted.
 * @returns {Map<string, number | null>} null for a worker that began a new life, or has not reported
 */
export function busyFractions(before, after) {
  const earlier = new Map(before.workers.map((worker) => [worker.worker_id, worker]));
  const seconds = after.at - before.at;
  return new Map(
    after.workers.map((worker) => [worker.worker_id, busyFraction(earlier.get(worker.worker_id), worker, seconds)]),
  );
}

function busyFraction(old, now, seconds) {
  if (!old || old.epoch !== now.epoch || old.busy_s === null || now.busy_s === null) return null;
  const computed = now.busy_s + now.step_age_s - (old.busy_s + old.step_age_s);
  return Math.min(1, Math.max(0, computed / seconds));
}

/** The mean busy fraction of a role's workers, null if it is known of none. */
export function roleBusy(before, after, role) {
  const fractions = busyFractions(before, after);
  const known = ofRole(after, role).map((worker) => fractions.get(worker.worker_id)).filter((each) => each !== null);
  return known.length ? known.reduce(sum, 0) / known.length : null;
}

/** The workers of a role; those that do both count as decode workers. */
export function ofRole(poll, role) {
  return poll.workers.filter((worker) => countsAs(worker.role) === role);
}

/** The role that a worker counts as where workers are counted. */
export function countsAs(role) {
  return role === "both" ? "decode" : role;
}

/** What a worker is that has this role, or both. */
export function roleInWords(role) {
  return role === "both" ? "a worker of both roles" : `a ${role} worker`;
}

/** The prefill workers, or where there are none the decode workers, which compute the prompts then. */
function readersOf(poll) {
  const prefill = ofRole(poll, "prefill");
  return prefill.length ? prefill : ofRole(poll, "decode");
}

/** Roles that the cluster has or wants: a colocated one has no prefill workers. */
export function rolesOf(poll) {
  return ["prefill", "decode"].filter((role) => role in poll.wanted || ofRole(poll, role).length);
}

/**
 * Requests that workers compute, and requests that wait. A request whose prompt is read holds a ticket at a decode worker, too,
 * and counts once: where there are prefill workers, what waits at decode workers is left out.
 */
export function requestCounts(poll) {
  const readers = readersOf(poll);
  return {
    running: poll.workers.reduce((count, worker) => count + (worker.running ?? 0), 0),
    waiting: readers.reduce((count, worker) => count + (worker.waiting ?? 0), total(poll, WAITING)),
  };
}

/** Mean seconds of each stage, of the requests that ended between the polls; null if none did. */
export function stageMeans(before, after) {
  const means = Object.entries(STAGES).map(([stage, family]) => [stage, mean(before, after, family)]);
  return means.some(([, each]) => each === null) ? null : Object.fromEntries(means);
}

function mean(before, after, family) {
  const count = growth(before, after, `${family}_count`);
  return count ? growth(before, after, `${family}_sum`) / count : null;
}

/**
 * A quantile of what a histogram observed between the polls, read as Prometheus' histogram_quantile does: within a bucket the
 * observations count as spread evenly. Null without any. Above the last bound it is that bound.
 */
export function quantile(before, after, family, share) {
  const name = `${family}_bucket`;
  const bounds = [...(after.totals.get(name)?.keys() ?? [])].map((label) => [bound(label), label]).sort(([a], [b]) => a - b);
  const counts = bounds.map(([upper, label]) => [upper, growth(before, after, name, label)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (!all) return null;
  const index = counts.findIndex(([, count]) => count >= share * all);
  const [upper, count] = counts[index];
  const [lower, below] = index ? counts[index - 1] : [0, 0];
  if (upper === Infinity) return lower;
  return lower + (upper - lower) * ((share * all - below) / (count - below || 1));
}

function bound(label) {
  return label === "+Inf" ? Infinity : Number(label);
}

/** The share of looked-up prompt tokens whose KV was there; null if none were looked up between the polls. */
export function cacheHits(before, after) {
  const earlier = new Map(before.workers.map((worker) => [worker.worker_id, worker]));
  let [hits, queries] = [0, 0];
  for (const worker of readersOf(after)) {
    const old = earlier.get(worker.worker_id);
    if (old?.epoch !== worker.epoch || old.prefix_cache_queries === null || worker.prefix_cache_queries === null) continue;
    hits += worker.prefix_cache_hits - old.prefix_cache_hits;
    queries += worker.prefix_cache_queries - old.prefix_cache_queries;
  }
  return queries > 0 ? hits / queries : null;
}

function sum(a, b) {
  return a + b;
}
