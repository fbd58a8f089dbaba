/**
 * The chat page. One answer runs at a time:
 *
 *   idle ── send ──► running ─┬─ the end ─────────────────► idle, the turn is kept
 *                             ├─ stop or failure, text ───► idle, the turn is kept with what there is
 *                             └─ stop or failure, none ───► idle, the question is back in the field
 *
 * For screen readers the conversation is a log. An answer is quiet while it grows and is put into the log anew when it is
 * complete, so that it is read once and as a whole; then come its figures. An answer of which something is selected stays.
 */

import { answerTo, Failure, servedModel } from "./api.js";
import { show } from "./text.js";

const KEY = "tandem-api-key";
const KEY_STATUSES = [401, 403]; // of answers that another key may change,
const KEYLESS = ["host", "origin"]; // unless this is what is wrong: the address of the page
const NEAR_END_PX = 80;
const SHORTEST_RATE_S = 0.05; // a browser that draws is late by that much, so a rate over less would say nothing

const [model, log, problem, keyForm, keyField, composer, message, sendButton, stopButton, settings, system, temperature, maxTokens] = [
  "model", "log", "problem", "key-form", "key", "composer", "message", "send", "stop", "settings", "system", "temperature", "max-tokens",
].map((id) => document.getElementById(id));

let key = storedKey();
let messages = []; // what was said, as the API takes it
let modelName = null;
let search = null; // the newest one for the model
let stopping = null; // the AbortController of the answer that runs
let running = Promise.resolve(); // settles when that answer has ended

/** An answer on its way to the log, and its times. */
class Answer {
  text = "";
  finishReason = null;
  #tokens = 0;
  #begun = performance.now();
  #first = null;
  #last = null;
  #frame = null;
  #body = make("div", { className: "text open", ariaLive: "off" });
  #figures = make("p", { className: "figures", role: "status" });

  constructor() {
    this.element = make("article", { className: "answer", ariaLabel: modelName });
    this.element.append(this.#body, this.#figures);
  }

  add(piece) {
    if (piece.tokens) {
      this.#last = performance.now();
      this.#first ??= this.#last;
      this.#tokens += piece.tokens;
    }
    this.text += piece.text;
    this.finishReason = piece.finishReason;
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      keepingEnd(() => show(this.#body, this.text));
    });
  }

  /** @param {string} remark on how it ended; may be empty */
  close(remark) {
    cancelAnimationFrame(this.#frame);
    keepingEnd(() => {
      show(this.#body, this.text);
      this.#body.className = "text";
      this.#body.ariaLive = null;
      if (!isInUse(this.#body)) this.#body.replaceWith(this.#body.cloneNode(true)); // which is read to those who can't see
      this.#figures.textContent = [...this.#measures(), remark].filter(Boolean).join("\u00a0· ");
    });
  }

  #measures() {
    if (!this.#tokens) return [];
    const [wait, rest] = [(this.#first - this.#begun) / 1000, (this.#last - this.#first) / 1000];
    const rate = rest > SHORTEST_RATE_S ? `${((this.#tokens - 1) / rest).toFixed(1)} tokens/s` : "";
    const count = `${this.#tokens} token${this.#tokens === 1 ? "" : "s"}`;
    return [`First token after ${wait.toFixed(2)} s`, rate, count];
  }
}

async function send() {
  const text = message.value.trim();
  if (!text || stopping || !valid()) return;
  stopping = new AbortController();
  const { signal } = stopping;
  problem.textContent = "";
  message.value = "";
  sendButton.hidden = true;
  stopButton.hidden = false;
  message.focus();
  try {
    if (!modelName) await findModel(signal);
    if (modelName) await ask(text, signal);
    else giveBack(text);
  } catch (error) {
    tell(error);
  } finally {
    stopping = null;
    if (document.activeElement === stopButton) message.focus();
    stopButton.hidden = true;
    sendButton.hidden = false;
  }
}

/** One turn. Throws what went wrong, unless it was stopped. */
async function ask(text, signal) {
  const question = make("article", { className: "question", ariaLabel: "You" });
  question.append(make("p", { textContent: text, dir: "auto" }));
  const answer = new Answer();
  log.append(question, answer.element);
  scrollTo(0, document.documentElement.scrollHeight);
  let [complete, remark] = [false, ""];
  try {
    for await (const piece of answerTo(bodyOf(text), key, signal)) answer.add(piece);
    complete = true;
    if (answer.finishReason === "length") remark = "token limit reached";
  } catch (error) {
    remark = signal.aborted ? "stopped" : "incomplete";
    if (!signal.aborted) throw error;
  } finally {
    if (complete || answer.text) {
      answer.close(remark);
      messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    } else {
      question.remove();
      answer.element.remove();
      giveBack(text);
    }
  }
}

/** Put a question back into the field, before what was typed meanwhile. */
function giveBack(text) {
  message.value = [text, message.value].filter(Boolean).join("\n\n");
}

function bodyOf(text) {
  const first = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
  const body = { model: modelName, messages: [...first, ...messages, { role: "user", content: text }] };
  if (temperature.value) body.temperature = temperature.valueAsNumber;
  if (maxTokens.value) body.max_tokens = maxTokens.valueAsNumber;
  return body;
}

/** What is no number at all. Which numbers are good the server says. */
function valid() {
  if (settings.checkValidity()) return true;
  settings.showPopover();
  return settings.reportValidity();
}

/**
 * Find the model, or tell why there is none, unless the search was stopped. Searches may overtake each other, with other keys:
 * only the newest one counts, and the earlier ones end with it.
 */
function findModel(signal = new AbortController().signal) {
  const mine = servedModel(key, signal).then(
    (name) => (mine === search ? showModel(name) : search),
    (error) => {
      if (mine !== search) return search;
      if (!signal.aborted) tell(error);
    },
  );
  search = mine;
  return mine;
}

function showModel(name) {
  modelName = model.textContent = model.title = name;
  message.placeholder = `Message ${name}`;
  if (!keyForm.hidden) message.focus();
  keyForm.hidden = true;
}

function tell(error) {
  if ([...KEY_STATUSES, 404].includes(error.status)) modelName = null; // it is asked for again
  if (KEY_STATUSES.includes(error.status) && !KEYLESS.includes(error.param)) {
    // Without a key the form says all there is to say, unless a key would not help.
    problem.textContent = key || error.status === 403 ? error.message : "";
    keepKey(null);
    keyForm.hidden = false;
    keyField.focus();
    return;
  }
  problem.textContent = error instanceof Failure ? error.message : `Something in this page broke: ${error}`;
}

async function newChat() {
  stopping?.abort();
  await running;
  messages = [];
  log.replaceChildren();
  problem.textContent = "";
  message.value = "";
  message.focus();
}

function useKey() {
  keepKey(keyField.value);
  keyField.value = "";
  problem.textContent = "";
  void findModel();
}

/** The key that this tab had before the page was loaded anew; null if there is none, or the browser lets pages store nothing. */
function storedKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function keepKey(value) {
  key = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // The browser lets pages store nothing: the key is there until the page is left.
  }
}

function make(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

/** Whether a reader has selected some of it, or scrolls it by keyboard: it has to stay then. */
function isInUse(element) {
  const selection = getSelection();
  return element.contains(document.activeElement) || (!selection.isCollapsed && selection.containsNode(element, true));
}

/** Whoever is at the end of the conversation stays there while it grows; whoever has scrolled up is left in peace. */
function keepingEnd(change) {
  const page = document.documentElement;
  const atEnd = page.scrollHeight - page.clientHeight - scrollY < NEAR_END_PX;
  change();
  if (atEnd) scrollTo(0, page.scrollHeight);
}

/** Whether a key goes to an input method. Safari ends a composition before it tells of the key that ended it. */
function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!stopping) running = send();
});
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !isComposing(event)) {
    event.preventDefault();
    composer.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  // The first Esc closes the settings, by the browser's own rule.
  if (event.key === "Escape" && !isComposing(event) && !settings.matches(":popover-open")) stopping?.abort();
});
stopButton.addEventListener("click", () => stopping?.abort());
document.getElementById("new-chat").addEventListener("click", newChat);
settings.addEventListener("submit", (event) => {
  event.preventDefault();
  settings.hidePopover();
});
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey();
});
void findModel();
