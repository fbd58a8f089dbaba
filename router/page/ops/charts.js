/**
 * What happened in the last two minutes, as lines: tokens a second, and how busy each role is.
 */

import { make, percent, short, write } from "./elements.js";

const SPAN_S = 120;
const BREAK_S = 6; // a longer silence is a gap in the line
const [WIDTH, HEIGHT] = [300, 52];

/** A chart of some lines over one scale. */
class Chart {
  #lines;
  #top = make("span", { className: "top quiet" });
  #legend = new Map();
  #svg = graphic("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });

  /**
   * @param {string} title
   * @param {Record<string, string>} lines name of each line to its class
   * @param {(value: number | null) => string} written how a value reads
   * @param {number | null} most the top of the scale; null for what the values need
   */
  constructor(title, lines, written, most) {
    Object.assign(this, { title, written, most });
    this.#lines = new Map(Object.entries(lines).map(([name, kind]) => [name, graphic("path", { class: kind })]));
    this.#svg.append(graphic("path", { class: "grid", d: `M0 ${HEIGHT / 2}H${WIDTH}` }), ...this.#lines.values());
    const legend = make("p", { className: "legend" });
    for (const [name, kind] of Object.entries(lines)) {
      const value = make("b");
      this.#legend.set(name, [value, make("span", { className: kind }, make("i"), `${name} `, value)]);
      legend.append(this.#legend.get(name)[1]);
    }
    const caption = make("figcaption", {}, make("span", { textContent: title }), legend);
    this.element = make("figure", {}, caption, make("div", { className: "plot" }, this.#svg, this.#top));
  }

  /** @param {{at: number, values: Record<string, number | null>}[]} points */
  show(points) {
    const names = [...this.#lines.keys()].filter((name) => points.some((point) => point.values[name] !== null));
    const found = points.flatMap((point) => names.map((name) => point.values[name] ?? 0));
    const most = this.most ?? rounded(Math.max(1, ...found));
    write(this.#top, this.written(most));
    const latest = points.at(-1);
    for (const [name, path] of this.#lines) {
      path.setAttribute("d", lineOf(points, name, most));
      const [value, entry] = this.#legend.get(name);
      entry.hidden = !names.includes(name);
      write(value, this.written(latest?.values[name] ?? null));
    }
    const now = names.map((name) => `${name} ${this.written(latest.values[name])}`).join(", ");
    this.#svg.setAttribute("aria-label", `${this.title} in the last two minutes; now ${now || "nothing"}`);
  }
}

function lineOf(points, name, most) {
  const end = points.at(-1)?.at ?? 0;
  let [path, last] = ["", null];
  for (const { at, values } of points) {
    if (values[name] === null) continue;
    const x = WIDTH * (1 - (end - at) / SPAN_S);
    const y = 1 + (HEIGHT - 2) * (1 - values[name] / most);
    path += `${last === null || at - last > BREAK_S ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    last = at;
  }
  return path;
}

/** The next of 1, 2, 5, 10, ... above a number, so that the scale seldom changes. */
function rounded(number) {
  const unit = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((step) => step * unit).find((each) => each >= number);
}

function graphic(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** The charts, and the points that they show. */
export class History {
  #points = [];
  #charts = [
    [new Chart("Tokens in per second", { prompts: "prefill" }, short, null), ({ tokens }) => ({ prompts: tokens.in })],
    [new Chart("Tokens out per second", { answers: "decode" }, short, null), ({ tokens }) => ({ answers: tokens.out })],
    [new Chart("Busy", { prefill: "prefill", decode: "decode" }, percent, 1), ({ busy }) => busy],
  ];

  constructor(parent) {
    parent.append(...this.#charts.map(([chart]) => chart.element));
  }

  /**
   * @param {number} at
   * @param {{in: number, out: number}} tokens a second
   * @param {{prefill: number | null, decode: number | null}} busy
   */
  add(at, tokens, busy) {
    this.#points.push({ at, tokens, busy });
    while (at - this.#points[0].at > SPAN_S) this.#points.shift();
    for (const [chart, values] of this.#charts) {
      chart.show(this.#points.map((point) => ({ at: point.at, values: values(point) })));
    }
  }
}
