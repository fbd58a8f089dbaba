/**
 * The list of what happened, newest first and bounded.
 */

import { make, write } from "./elements.js";

const MOST = 100;
const SAME_S = 30;

/** Events as {kind, text}, or {kind, number, noun, rest} for what is counted: the like of it within a while is added up. */
export class Events {
  #list;
  #hint;
  #counted = new Map();

  constructor(list, hint) {
    this.#list = list;
    this.#hint = hint;
  }

  /** @param {number} at seconds, of the clock of the polls */
  add(at, event) {
    const earlier = this.#counted.get(keyOf(event));
    if (event.noun && earlier && at - earlier.at < SAME_S && earlier.element.isConnected) {
      earlier.number += event.number;
      earlier.at = at;
      write(earlier.element.querySelector("span"), textOf({ ...event, number: earlier.number }));
      return;
    }
    this.#hint.hidden = true;
    const date = new Date();
    const time = make("time", { textContent: date.toLocaleTimeString("en-GB"), title: date.toLocaleString("en-GB") });
    const element = make("li", { className: event.kind }, time, " ", make("span", { textContent: textOf(event) }));
    this.#list.prepend(element);
    if (event.noun) this.#counted.set(keyOf(event), { at, number: event.number, element });
    while (this.#list.children.length > MOST) this.#list.lastElementChild.remove();
  }
}

function keyOf(event) {
  return `${event.noun}${event.rest}`;
}

function textOf(event) {
  return event.text ?? `${event.number} ${event.noun}${event.number === 1 ? "" : "s"}${event.rest}`;
}
