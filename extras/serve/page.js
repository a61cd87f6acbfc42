// The page: it asks for text, shows it, and does what people want with it. What a server or a model
// sends becomes text nodes, never HTML; colours and bars are set as properties, not as attributes.

import { complete, modelName } from "./page.stream.js";
import {
  add, choiceRows, cut, element, focusable, grow, indexOf, tokens, written,
} from "./page.text.js";

const $ = (id) => document.getElementById(id);
const end = document.querySelector("footer");
const form = $("settings");
const UNESCAPED = { n: "\n", t: "\t", "\\": "\\" };

let begin = ""; // the prompt that the tokens follow
let running = null; // AbortController of the request under way
let news = null; // what the status line is to say when the browser paints next
let following = true; // the end of the text is kept in sight
let height = 0; // where the page was scrolled to

// ---------------------------------------------------------------------------------- writing

/** Let the model go on after `prompt`. The text changes in `accepted`, called when the server has
 *  taken the request: one that it refuses costs nothing.
 */
async function run(prompt, accepted) {
  const values = readSettings();
  if (!values) return;
  running?.abort();
  const mine = (running = new AbortController());
  const clock = { n: 0, first: 0, began: 0, last: 0 };
  closeChoices();
  following = true;
  $("error").hidden = true;
  tell(clock, "waiting for the server");
  let how = "";
  try {
    const parts = await complete({ prompt, ...values }, $("key").value, mine.signal);
    if (mine !== running) return; // a newer request has taken over
    accepted();
    for await (const part of parts) {
      if (mine !== running) return;
      count(clock, part.tokens.length);
      part.grown.forEach(grow);
      part.tokens.forEach(add);
      how = { stop: "ended", length: "limit reached" }[part.reason] ?? "";
      tell(clock, "writing");
    }
  } catch (error) {
    if (mine !== running) return;
    how = error.name === "AbortError" ? "stopped" : clock.n ? "broken off" : "";
    if (!how || how === "broken off") complain(error);
  }
  if (mine !== running) return;
  running = null;
  tell(clock, how);
}

function complain(error) {
  $("error").textContent = error.message;
  $("error").dataset.status = error.status ?? "";
  $("error").hidden = false;
  if (error.status === 401) $("key").parentElement.hidden = false;
}

/** Note that n tokens came; those of the first event are not part of the speed. */
function count(clock, n) {
  clock.last = performance.now();
  if (!clock.n) [clock.first, clock.began] = [n, clock.last];
  clock.n += n;
}

/** Say how it goes; several calls between two frames cost one update. */
function tell(clock, how) {
  if (!news) requestAnimationFrame(paint);
  news = { ...clock, how };
}

function paint() {
  const { n, first, began, last, how } = news;
  news = null;
  const rate = n > first && last > began ? (1000 * (n - first)) / (last - began) : 0;
  const speed = rate ? ` · ${rate.toFixed(rate < 10 ? 1 : 0)}/s` : "";
  $("count").textContent = n ? `${n} token${n > 1 ? "s" : ""}${speed} · ` : "";
  if ($("how").textContent !== how) $("how").textContent = how; // else it is read aloud again
  const nothing = !begin && !tokens.length;
  $("stop").disabled = !running;
  $("go_on").disabled = $("edit").disabled = nothing || Boolean(running);
  $("copy").disabled = nothing;
  $("hint").hidden = tokens.length > 0;
  $("legend").hidden = !tokens.length;
  if (n && following) end.scrollIntoView({ block: "nearest" });
  height = window.scrollY;
}

// ------------------------------------------------------------------ what else was considered

function openChoices(i) {
  closeChoices();
  const { spans } = tokens[i];
  const rows = choiceRows(tokens[i], (name, logprob) => replace(i, name, logprob));
  $("rows").replaceChildren(...rows);
  $("about").textContent = rows.length ? "Choose one to write on from here."
    : "The server did not say what else was considered.";
  for (const span of spans) span.classList.add("open");
  place(spans[0]);
}

/** Show the table below a token, within the sheet; on a small screen the style sheet decides. */
function place(span) {
  const box = $("choices");
  box.hidden = false;
  const sheet = box.parentElement.getBoundingClientRect();
  const at = [...span.getClientRects()].pop(); // its part in its last line
  const left = Math.min(at.left - sheet.left, sheet.width - box.offsetWidth - 8);
  box.style.left = `${Math.max(left, 8)}px`;
  box.style.top = `${at.bottom - sheet.top + 6}px`;
  box.scrollIntoView({ block: "nearest" });
  const hides = at.bottom - box.getBoundingClientRect().top; // a fixed one may hide the token
  if (getComputedStyle(box).position === "fixed" && hides > 0) window.scrollBy(0, hides + 16);
  (box.querySelector(".took button:enabled") ?? box).focus({ preventScroll: true });
}

/** Returns the token that they were of. */
function closeChoices() {
  $("choices").hidden = true;
  const spans = [...$("written").querySelectorAll(".open")];
  for (const span of spans) span.classList.remove("open");
  return spans[0];
}

/** Token i becomes another one, and the model goes on from there. */
function replace(i, name, logprob) {
  const token = { ...tokens[i], text: name, name, logprob, picked: true };
  run(begin + written(i) + name, () => {
    cut(i);
    add(token);
    go(i);
  });
}

// ------------------------------------------------------------------------------- settings

/** All as the server takes them; null where one is not valid, which the browser then shows. */
function readSettings() {
  if ($("new_seed").checked) form.elements.seed.value = Math.floor(Math.random() * 1e6);
  if (!form.reportValidity()) return null;
  const { stop, ...values } = Object.fromEntries(new FormData(form));
  for (const name in values) values[name] = Number(values[name]);
  return stop ? { ...values, stop: stop.replace(/\\([nt\\])/g, (_, c) => UNESCAPED[c]) } : values;
}

/** Write beside each slider where it stands. */
function showSettings() {
  for (const slider of form.querySelectorAll("input[type=range]")) {
    const off = slider.value === slider.dataset.off;
    slider.parentElement.querySelector("output").textContent = off ? "off" : slider.value;
  }
}

// -------------------------------------------------------------------------- what people do

function write() {
  const prompt = $("prompt").value;
  run(prompt, () => {
    cut(0);
    $("begin").textContent = begin = prompt;
  });
}

async function copy() {
  const text = begin + written();
  try {
    await navigator.clipboard.writeText(text); // exists on this machine or over https only
  } catch {
    const area = element("textarea", "", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
}

function edit() {
  $("prompt").value = begin + written();
  cut(0);
  $("begin").textContent = begin = "";
  closeChoices();
  tell({ n: 0 }, "");
  $("prompt").focus();
}

function go(i) {
  focusable(i);
  tokens[i].spans[0].focus();
}

/** Arrow keys go through the tokens; Enter or the space bar opens one. */
function walk(event) {
  if (event.ctrlKey || event.metaKey) return;
  const i = indexOf(event.target);
  const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (event.key === "Enter" || event.key === " ") event.target.click();
  else if (tokens[to]) go(to);
  else return;
  event.preventDefault();
}

function shortcut(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) write();
  else if (event.key !== "Escape") return;
  else if ($("choices").hidden) running?.abort();
  else closeChoices()?.focus();
}

/** Follow the end as it goes down, until somebody scrolls up, and again once it is in sight. */
function scrolled() {
  const { bottom } = end.getBoundingClientRect();
  const below = bottom > window.innerHeight + 40;
  following = below ? following && window.scrollY >= height : bottom > 0;
  height = window.scrollY;
}

/** Show the model's name; that takes the key, so there is nothing wrong with it any more. */
function nameModel() {
  modelName($("key").value).then((name) => {
    $("model").textContent = name;
    if ($("error").dataset.status === "401") $("error").hidden = true;
  }, complain);
}

$("write").addEventListener("click", write);
$("stop").addEventListener("click", () => running?.abort());
$("go_on").addEventListener("click", () => run(begin + written(), () => {}));
$("edit").addEventListener("click", edit);
$("copy").addEventListener("click", copy);
$("written").addEventListener("keydown", walk);
document.addEventListener("keydown", shortcut);
document.addEventListener("scroll", scrolled);
document.addEventListener("click", (event) => {
  const i = indexOf(event.target);
  if (i >= 0) openChoices(i);
  else if (!$("choices").contains(event.target)) closeChoices();
});
$("key").addEventListener("change", nameModel);
form.addEventListener("input", showSettings);
form.addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("pageshow", showSettings); // a browser restores values after a reload
nameModel();
