// The tokens after the beginning of the text, and the spans that show them.

import { element } from "./page.choices.js";

export const tokens = []; // {text, name, logprob, top, picked, spans}
const place = document.getElementById("written");

/** The text of the first n tokens, or of all. */
export const written = (n = tokens.length) => tokens.slice(0, n).map((t) => t.text).join("");

/** Which token an element shows, or -1. */
export const indexOf = (span) => tokens.findIndex((token) => token.spans.includes(span));

/** Put a token at the end of the text.
 *
 *  A paragraph is laid out anew whenever it grows, so each line is an element of its own and long
 *  texts stay quick. The first line is none, as it goes on where the beginning ends. A token with
 *  a part of the next line is shown by two spans.
 */
export function add(token) {
  const at = token.text.lastIndexOf("\n") + 1 || token.text.length;
  token.spans = [];
  for (const piece of [token.text.slice(0, at), token.text.slice(at)]) {
    if (token.spans.length && !piece) break; // the first one may be empty: a part of a character
    const span = element("span", "token", piece);
    span.classList.toggle("picked", Boolean(token.picked));
    span.classList.toggle("newline", /^\n+$/.test(piece)); // the style sheet makes it visible
    const doubt = Math.min(-(token.logprob ?? 0) / 6, 1); // 1: a chance below 1 in 400
    if (doubt > 0.01) span.style.setProperty("--doubt", doubt.toFixed(2));
    const last = token.spans[0] ?? tokens.at(-1)?.spans.at(-1);
    const line = last?.textContent.endsWith("\n") ? place.appendChild(element("div")) : null;
    (line ?? last?.parentElement ?? place).append(span);
    token.spans.push(span);
  }
  const [button] = token.spans;
  button.setAttribute("role", "button");
  button.tabIndex = tokens.length ? -1 : 0; // one stop for the Tab key; arrows do the rest
  tokens.push(token);
}

/** Show a token whose text has become longer. */
export function grow({ spans, text }) {
  spans.forEach((span, i) => (span.textContent = i ? "" : text));
}

/** Keep the first n tokens only. */
export function cut(n) {
  for (const span of tokens.splice(n).flatMap((token) => token.spans)) {
    const line = span.parentElement;
    span.remove();
    if (line !== place && !line.firstChild) line.remove();
  }
  if (n) focusable(0);
}

/** Token i is where the Tab key finds the text. */
export function focusable(i) {
  for (const span of place.querySelectorAll("[tabindex='0']")) span.tabIndex = -1;
  tokens[i].spans[0].tabIndex = 0;
}
