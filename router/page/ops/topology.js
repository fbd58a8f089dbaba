/**
 * A card for each worker, prefill workers on the left and decode workers on the right, those that do both among them. Cards
 * stay where they are while their figures change, so that the focus does, too.
 */

import { bar, fill, make, percent, short, write } from "./elements.js";
import { ofRole } from "./figures.js";

const MANY = 40;
const STUCK_S = 10;

/** What a card says in figures: a field of /admin/status, its name for people, and how it is shown. */
const FIGURES = [
  ["running", "run"],
  ["waiting", "wait"],
  ["queued_tokens", "queue"],
  ["cached_tokens", "cache"],
  ["epoch", "epoch"],
  ["restarts", "restarts"],
];

/** One role's cards. */
class Pool {
  #cards = new Map();
  #count;
  #list;

  constructor(section, orders) {
    this.section = section;
    this.orders = orders;
    this.#count = section.querySelector("small");
    this.#list = section.querySelector("ul");
  }

  /** @param {boolean} flips whether workers of this cluster may take another role */
  show(workers, wanted, busy, flips) {
    this.section.hidden = !workers.length && wanted === undefined;
    const ready = workers.filter((worker) => worker.state === "ready").length;
    write(this.#count, `${ready} of ${wanted ?? workers.length} ready`);
    this.#list.classList.toggle("many", workers.length > MANY);
    const sorted = [...workers].sort((a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
    for (const [name, card] of this.#cards) {
      if (sorted.some((worker) => worker.worker_id === name)) continue;
      card.element.remove();
      this.#cards.delete(name);
    }
    sorted.forEach((worker, index) => this.#place(worker, index).show(worker, busy.get(worker.worker_id) ?? null, flips));
  }

  #place(worker, index) {
    const name = worker.worker_id;
    if (!this.#cards.has(name)) this.#cards.set(name, new Card(worker, this.orders));
    const card = this.#cards.get(name);
    const there = this.#list.children[index];
    if (there !== card.element) this.#list.insertBefore(card.element, there ?? null);
    return card;
  }
}

class Card {
  #state = make("span", { className: "state" });
  #busy = bar("busy");
  #kv = bar("kv");
  #busyText = make("span");
  #kvText = make("span");
  #figures = new Map();
  #trouble = make("p", { className: "trouble" });
  #flip;
  #drain;
  #role = null;
  #both = make("span", { className: "both", textContent: "both roles" });

  constructor({ worker_id: name }, orders) {
    const button = (order, open) => {
      const made = make("button", { type: "button", ariaLabel: `${order} ${name}`, textContent: order });
      made.addEventListener("click", () => open(name, this.#role));
      return made;
    };
    this.#flip = button("Flip", orders.flip);
    this.#drain = button("Drain", orders.drain);
    const title = make("h3", { textContent: name });
    const head = make("div", { className: "head" }, title, this.#both, this.#state, this.#flip, this.#drain);
    const shares = [
      ["busy", this.#busy, this.#busyText],
      ["KV", this.#kv, this.#kvText],
    ].map(([label, ...parts]) => make("div", { className: "share" }, make("span", { textContent: label }), ...parts));
    const figures = make("dl", { className: "figures" });
    for (const [field, label] of FIGURES) {
      const value = make("dd");
      this.#figures.set(field, value);
      figures.append(make("div", {}, make("dt", { textContent: label }), value));
    }
    this.element = make("li", { className: "card" }, head, ...shares, figures, this.#trouble);
  }

  /**
   * @param {number | null} busy the share of time in which its engine computes
   * @param {boolean} flips whether it may take another role
   */
  show(worker, busy, flips) {
    this.#role = worker.role;
    this.#both.hidden = worker.role !== "both";
    const stuck = worker.step_age_s > STUCK_S;
    const state = worker.state === "ready" && !worker.linked ? "out of reach" : worker.state;
    this.element.dataset.state = stuck ? "stuck" : state.replaceAll(" ", "-");
    write(this.#state, stuck ? `in one step for ${Math.round(worker.step_age_s)} s` : state);
    fill(this.#busy, busy);
    write(this.#busyText, percent(busy));
    fill(this.#kv, worker.kv_usage);
    write(this.#kvText, percent(worker.kv_usage));
    for (const [field] of FIGURES) write(this.#figures.get(field), short(worker[field]));
    write(this.#trouble, troubleOf(worker));
    this.#trouble.title = this.#trouble.textContent;
    this.#drain.disabled = worker.state !== "ready";
    this.#flip.disabled = worker.state !== "ready" || !flips;
  }
}

/** Why its former life ended, and what keeps it from starting; empty for a worker in its first life. */
function troubleOf(worker) {
  const waits = worker.state === "starting" && worker.quick_ends > 1 ? `waits ${worker.start_delay_s} s before it starts` : "";
  return [worker.last_error, waits].filter(Boolean).join("; ");
}

/** Both pools. `orders` has `drain` and `flip`, each called with the id and the role of a worker. */
export class Topology {
  #pools;

  constructor(orders) {
    const section = (role) => document.querySelector(`#topology .${role}`);
    this.#pools = ["prefill", "decode"].map((role) => [role, new Pool(section(role), orders)]);
  }

  /** @param {Map<string, number | null>} busy by worker */
  show(poll, busy) {
    for (const [role, pool] of this.#pools) {
      pool.show(ofRole(poll, role), poll.wanted[role], busy, Object.keys(poll.wanted).length > 1);
    }
  }
}
