/**
 * Small helpers for elements, and how figures are written.
 */

const NONE = "–";

/** An element with properties and children. Text stays text. */
export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Write a text where it differs, so that what stands still is not read aloud again. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A bar of a share from 0 to 1. The number stands beside it as text. */
export function bar(kind) {
  return make("span", { className: `bar ${kind}`, ariaHidden: "true" }, make("span"));
}

export function fill(element, share) {
  element.firstChild.style.inlineSize = `${(share ?? 0) * 100}%`;
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${Math.round(share * 100)}%`;
}

/** 1234567 as 1.2M: three digits at most. */
export function short(number) {
  if (number === null || number === undefined) return NONE;
  if (number < 1000) return String(Math.round(number));
  const [unit, sign] = number < 999_500 ? [1e3, "k"] : number < 999_500_000 ? [1e6, "M"] : [1e9, "G"];
  const scaled = number / unit;
  return `${scaled.toFixed(scaled < 9.95 ? 1 : 0)}${sign}`;
}

/** Seconds in the unit that suits them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  return seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
}
