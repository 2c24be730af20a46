"use strict";
// Choosing is an action: download the chosen row's plan, copy it, certify it, and pin two rows beside each other.

const pins = { A: null, B: null };

function showActions(plan, row) {
  const focused = document.activeElement?.dataset.action;
  element("choice-title").textContent = `Chosen: ${row.label}`;
  element("details").replaceChildren();
  const about = make(element("details"), "p");
  term(about, row.family);
  about.append(" with ");
  term(about, row.sampling);
  about.append(` batches: noise multiplier ${row.cells["σ"]}, RMSE ${row.cells.RMSE}, ${row.cost}, ${row.cells["noise is"]}.`);
  for (const line of row.details) make(element("details"), "p", { class: "fine" }, line);
  const bar = element("actions");
  bar.replaceChildren();
  element("copies").replaceChildren();
  if (row.file) action("download", "Download plan.json", () => download(row));
  if (!row.certified && DATA.live) action("certify", "Certify this row", () => document.dispatchEvent(new Event("certify")));
  for (const place of Object.keys(pins)) action(`pin-${place}`, `Pin as ${place}`, () => pin(place, plan, row));
  if (row.command) copied("command", row.certified ? "Command that makes this plan" : "Command that certifies this row", row.command);
  copied("python", "Python that trains with plan.json", plan.python);
  if (focused) document.querySelector(`[data-action="${focused}"]`)?.focus({ preventScroll: true });
}

function action(name, text, act, parent = element("actions")) {
  const button = make(parent, "button", { type: "button", "data-action": name }, text);
  button.addEventListener("click", act);
  return button;
}

function tell(text) {
  element("said").textContent = text;
}

function copied(name, title, text) {
  const box = make(element("copies"), "div"), head = make(box, "p");
  make(head, "strong", {}, title);
  const code = make(box, "pre", { tabindex: "0", id: `copy-${name}` }, text);
  action(`copy-${name}`, "Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      tell(`Copied: ${title.toLowerCase()}.`);
    } catch {
      getSelection().selectAllChildren(code); // where the browser refuses, one key press is left to do
      tell("Selected: press Ctrl-C (⌘C) to copy.");
    }
  }, head).setAttribute("aria-label", `Copy: ${title}`);
}

function download(row) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([row.file], { type: "application/json" }));
  link.download = "plan.json";
  link.click();
  URL.revokeObjectURL(link.href);
  tell(`plan.json holds ${row.label}. Check it with: quell verify plan.json`);
}

function pin(place, plan, row) {
  pins[place] = { row, facts: columnsOf(plan), setup: plan.setup, promise: plan.promise };
  showPins();
  tell(`Pinned ${row.label} as ${place}.`);
}

function showPins() {
  const table = element("pairs"), places = Object.keys(pins).filter(place => pins[place]);
  element("pinned").hidden = !places.length;
  table.replaceChildren();
  const head = make(make(table, "thead"), "tr"), body = make(table, "tbody");
  make(head, "td");
  for (const place of places) {
    const cell = make(head, "th", { scope: "col" }, `${place}: ${pins[place].row.label} `);
    action(`unpin-${place}`, "remove", () => { pins[place] = null; showPins(); }, cell).setAttribute("aria-label", `Remove ${place}`);
  }
  const both = places.length === 2;
  if (both) make(head, "th", { scope: "col" }, "B against A");
  const line = (title, texts, difference = "") => {
    const cells = make(body, "tr");
    term(make(cells, "th", { scope: "row" }), title);
    for (const text of texts) make(cells, "td", {}, text);
    if (both) make(cells, "td", {}, difference);
  };
  line("run", places.map(place => pins[place].setup));
  line("promise", places.map(place => pins[place].promise));
  for (const fact of pins[places[0]]?.facts ?? []) {
    const [one, other] = places.map(place => pins[place].row.scores[fact]);
    line(fact, places.map(place => pins[place].row.cells[fact]), other ? change(other / one) : "");
  }
}

function change(ratio) {
  const percent = Math.round(100 * (ratio - 1));
  return percent ? `${Math.abs(percent).toLocaleString("en")}% ${percent < 0 ? "lower" : "higher"}` : "the same";
}

const DATA = JSON.parse(element("data").textContent);
if (DATA.plan) showPlan(DATA.plan);
