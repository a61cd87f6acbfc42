// What else the model considered for a token, as rows of a table. All that a model says becomes
// text nodes, never HTML; the length of a bar is set as a property, not as an attribute.

/** An element with texts or other elements in it. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children); // a string becomes a text node, whatever it says
  return made;
}

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
