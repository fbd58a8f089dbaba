/**
 * The figures of the whole cluster: the summary on top, and where requests' time goes.
 */

import { duration, make, percent, short, write } from "./elements.js";
import {
  LATENCIES, QUANTILES, STAGES, cacheHits, growth, growths, ofRole, quantile, requestCounts, rolesOf, stageMeans,
} from "./figures.js";

const ENDED = "tandem:request_decode_time_seconds_count";
const PLACED = "tandem:disaggregation_decisions_total";

/** The tiles on top. */
export class Summary {
  #values = new Map();

  constructor(parent) {
    this.parent = parent;
  }

  /**
   * @param {object} poll the latest
   * @param {object | null} before of some seconds ago
   * @param {{in: number | null, out: number | null}} tokens a second
   */
  show(poll, before, tokens) {
    for (const role of rolesOf(poll)) {
      const ready = ofRole(poll, role).filter((worker) => worker.state === "ready").length;
      const wanted = poll.wanted[role] ?? 0;
      this.#tile(`${role} ready`, `${ready} / ${wanted}`, ready < wanted ? "short" : "");
    }
    const { running, waiting } = requestCounts(poll);
    this.#tile("requests running", short(running));
    this.#tile("waiting", short(waiting));
    this.#tile("tokens/s in", short(tokens.in));
    this.#tile("tokens/s out", short(tokens.out));
    if (poll.autoscaler) this.#tile("autoscaler", poll.autoscaler.paused ? "paused" : "on", poll.autoscaler.problem ? "short" : "");
    if (poll.rollout) this.#tile("rollout", rolloutText(poll.rollout), poll.rollout.reason ? "short" : "");
    this.#tile("prompt cached", percent(before && cacheHits(before, poll)));
  }

  #tile(name, text, kind = "") {
    if (!this.#values.has(name)) {
      const value = make("dd");
      this.#values.set(name, value);
      this.parent.append(make("div", {}, make("dt", { textContent: name }), value));
    }
    write(this.#values.get(name), text);
    this.#values.get(name).dataset.kind = kind;
  }
}

function rolloutText({ phase, share }) {
  return share ? `${phase.replaceAll("_", " ")}, ${percent(share)}` : phase.replaceAll("_", " ");
}

/** The stages of the requests that ended, as one bar, and quantiles of what clients notice. */
export class TimeSpent {
  #segments = new Map();
  #texts = new Map();
  #cells = new Map();
  #remark = make("p", { className: "quiet" });

  constructor(stages, latencies) {
    const whole = make("div", { className: "stacked", ariaHidden: "true" });
    const legend = make("dl", { className: "legend" });
    for (const stage of Object.keys(STAGES)) {
      this.#segments.set(stage, make("span", { className: stage }));
      this.#texts.set(stage, make("dd"));
      whole.append(this.#segments.get(stage));
      legend.append(make("div", { className: stage }, make("dt", {}, make("i"), stage), this.#texts.get(stage)));
    }
    stages.append(whole, legend, this.#remark);
    for (const name of Object.keys(LATENCIES)) {
      const cells = QUANTILES.map(() => make("td"));
      this.#cells.set(name, cells);
      latencies.append(make("tr", {}, make("th", { scope: "row", textContent: name }), ...cells));
    }
  }

  /** @param {object | null} before of half a minute ago */
  show(poll, before) {
    const means = before && stageMeans(before, poll);
    const whole = means ? Object.values(means).reduce((a, b) => a + b, 0) : 0;
    for (const stage of Object.keys(STAGES)) {
      const share = whole ? means[stage] / whole : 0;
      this.#segments.get(stage).style.inlineSize = `${share * 100}%`;
      write(this.#texts.get(stage), means ? `${duration(means[stage])}, ${percent(share)}` : "–");
    }
    write(this.#remark, this.#remarkOn(before, poll, means));
    for (const [name, cells] of this.#cells) {
      cells.forEach((cell, index) => {
        write(cell, duration(before && quantile(before, poll, LATENCIES[name], QUANTILES[index])));
      });
    }
  }

  #remarkOn(before, poll, means) {
    if (!means) return "No request has ended.";
    const ended = growth(before, poll, ENDED);
    const placed = Object.fromEntries(growths(before, poll, PLACED));
    const [there, here] = [placed.there ?? 0, placed.here ?? 0];
    const where = there + here ? ` ${percent(there / (there + here))} of new prompts were computed at prefill workers.` : "";
    return `Means of the ${short(ended)} ${ended === 1 ? "request" : "requests"} that ended.${where}`;
  }
}
