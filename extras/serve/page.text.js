// The tokens after the beginning of the text, the spans that show them, and what else the model
// considered, as rows of a table. All that a model says becomes text nodes, never HTML.

export const tokens = []; // {text, name, logprob, top, picked, spans}
const place = document.getElementById("written");

/** An element with texts or other elements in it. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children); // a string becomes a text node, whatever it says
  return made;
}

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

// ------------------------------------------------------------------ what else was considered

/** A token's name with its white space and control characters made visible. */
function visible(name) {
  const signs = { " ": "␣", "\n": "⏎", "\t": "⇥" };
  const sign = (c) => signs[c] ?? `\\u${c.codePointAt(0).toString(16)}`;
  const parts = name.split(/([\p{C}\p{Z}])/u); // every second one is such a character
  return element("bdi", "", ...parts.map((c, i) => (i % 2 ? element("span", "mark", sign(c)) : c)));
}

/** Two or more digits that say something: 43, 7.1, 0.032. */
function percent(p) {
  if (p < 0.0001) return "< 0.01 %";
  return `${p < 0.0995 ? (p * 100).toPrecision(2) : (p * 100).toFixed()} %`;
}

function row(what, p, className) {
  const bar = element("div");
  bar.style.width = `${p * 100}%`;
  const cells = [element("td", "bar", bar), element("td", "percent", percent(p))];
  return element("tr", className, element("th", "", what), ...cells);
}

/** The rows of a token {name, logprob, top}, the likeliest first; `choose` gets a name and its
 *  log-probability when somebody picks it.
 */
export function choiceRows({ name, logprob, top }, choose) {
  const all = new Map(Object.entries(top ?? {}));
  if (name !== undefined) all.set(name, logprob);
  const sorted = [...all].map(([other, logp]) => [other, Math.exp(logp ?? -Infinity), logp])
    .sort((a, b) => b[1] - a[1]);
  const rows = sorted.map(([other, p, logp]) => {
    const button = element("button", "", visible(other));
    button.disabled = /^bytes:|^<\|.*\|>$/s.test(other); // no prompt can say it
    button.addEventListener("click", () => choose(other, logp));
    return row(button, p, other === name ? "took" : "");
  });
  const rest = 1 - sorted.reduce((sum, [, p]) => sum + p, 0);
  if (rows.length && rest > 0.0001) rows.push(row(element("span", "", "all others"), rest, "rest"));
  return rows;
}
