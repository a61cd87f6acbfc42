// The settings beside the text.

const form = document.getElementById("settings");
const newSeed = document.getElementById("new_seed");
const UNESCAPED = { n: "\n", t: "\t", "\\": "\\" };

/** All as the server takes them; null where one is not valid, which the browser then shows. */
export function readSettings() {
  if (newSeed.checked) form.elements.seed.value = Math.floor(Math.random() * 1e6);
  if (!form.reportValidity()) return null;
  const { stop, ...values } = Object.fromEntries(new FormData(form));
  for (const name in values) values[name] = Number(values[name]);
  return stop ? { ...values, stop: stop.replace(/\\([nt\\])/g, (_, c) => UNESCAPED[c]) } : values;
}

/** Write beside each slider where it stands. */
function show() {
  for (const slider of form.querySelectorAll("input[type=range]")) {
    const off = slider.value === slider.dataset.off;
    slider.parentElement.querySelector("output").textContent = off ? "off" : slider.value;
  }
}

form.addEventListener("input", show);
form.addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("pageshow", show); // a browser puts back what was there before a reload
