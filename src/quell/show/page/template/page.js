"use strict";
// A plan's content (quell.show.page.content) into the page. Text only ever becomes text nodes.

const element = id => document.getElementById(id);
const keyOf = row => `${row.label} | ${row.sampling}`;
let shown = null; // the plan on the page
let chosen = 0; // index of the row whose curves are shown
let picked = null; // the row that a person picked, kept while the plan changes

function showPlan(plan) {
  const focused = focusedRow();
  shown = plan;
  const again = plan.mechanisms.findIndex(row => keyOf(row) === picked);
  chosen = again < 0 ? plan.recommended : again;
  element("plan").hidden = false;
  element("setup").textContent = plan.setup;
  element("preview").hidden = !plan.preview;
  element("headline").textContent = plan.preview ? `So far: ${plan.headline}` : plan.headline;
  showCards(plan);
  showScale(plan.scale);
  fill("reasons", plan.why, "p");
  fill("notes", plan.notes, "li");
  showPairs("legend", plan.legend);
  showPairs("privacy", plan.privacy.map(({ title, text }) => [title, text]));
  showPairs("words", Object.entries(plan.terms));
  showTable(plan);
  showChoice(plan);
  if (focused !== null) radioOf(focused)?.focus({ preventScroll: true });
}

function fill(id, lines, tag) {
  element(id).replaceChildren();
  for (const line of lines) make(element(id), tag, {}, line);
}

function showPairs(id, pairs) {
  element(id).replaceChildren();
  for (const [title, text] of pairs) {
    const pair = make(element(id), "div");
    make(pair, "dt", {}, title);
    make(pair, "dd", {}, text);
  }
}

// A word that explains itself when it is pressed, by mouse, finger or keyboard.
function term(parent, text, key = text) {
  const meaning = shown.terms[key];
  if (!meaning) return void parent.append(text);
  const button = make(parent, "button", { type: "button", class: "term", "aria-haspopup": "dialog" }, text);
  button.addEventListener("click", () => explain(button, meaning));
}

function explain(button, meaning) {
  const box = element("explanation");
  box.textContent = meaning;
  box.showPopover();
  const at = button.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  box.style.left = `${Math.max(8, Math.min(at.left, wide - box.offsetWidth - 8))}px`;
  box.style.top = `${at.bottom + box.offsetHeight + 8 > innerHeight ? Math.max(8, at.top - box.offsetHeight - 6) : at.bottom + 6}px`;
}

function showCards(plan) {
  element("cards").replaceChildren();
  for (const card of plan.cards) {
    const item = make(element("cards"), "li");
    term(make(item, "span", { class: "fine" }), card.title);
    make(item, "strong", {}, card.value);
    make(item, "span", { class: "fine" }, card.note);
  }
}

function showScale(scale) {
  const box = element("scale"), from = -1, to = 2; // powers of ten
  box.replaceChildren();
  const place = value => (Math.min(Math.max(Math.log10(value), from), to) - from) / (to - from) * 300;
  const svg = make(box, "svg", { viewBox: "0 0 300 14", role: "img", "aria-label": scale.text, preserveAspectRatio: "none" });
  const ends = [0, ...scale.bounds.map(place), 300];
  scale.words.forEach((_, i) => make(svg, "rect", { class: `zone zone-${i}`, x: ends[i], y: 4, width: ends[i + 1] - ends[i], height: 6 }));
  make(svg, "rect", { class: "mark", x: Math.min(Math.max(place(scale.epsilon) - 2, 0), 296), y: 0, width: 4, height: 14 });
  const row = make(box, "p", { class: "fine", "aria-hidden": "true" });
  for (const word of scale.words) make(row, "span", {}, word);
}

const columnsOf = plan => ["σ", ...plan.errors, "gain", "mem", "draws", "batches", "noise is"]; // rows are sorted by the first error
const isMinor = (plan, column) => !["mechanism", plan.errors[0], "gain", "mem"].includes(column); // a phone leaves it to the chosen row's details

function showTable(plan) {
  const table = element("mechanisms"), columns = columnsOf(plan);
  table.replaceChildren();
  const head = make(make(table, "thead"), "tr");
  for (const title of ["mechanism", ...columns]) {
    const cell = make(head, "th", { scope: "col" });
    if (isMinor(plan, title)) cell.classList.add("minor");
    term(cell, title);
    if (title === plan.errors[0]) {
      cell.setAttribute("aria-sort", "ascending");
      cell.append(" ▲");
    }
  }
  const body = make(table, "tbody");
  plan.mechanisms.forEach((row, index) => {
    const line = make(body, "tr");
    if (index === plan.recommended) line.classList.add("recommended");
    if (!row.fits) line.classList.add("beyond");
    const label = make(make(line, "td"), "label");
    const radio = make(label, "input", { type: "radio", name: "mechanism", value: index });
    radio.checked = index === chosen;
    radio.addEventListener("change", () => choose(index));
    label.append(` ${row.label}${index === plan.recommended ? " (recommended)" : row.fits ? "" : " (beyond limits)"}`);
    for (const column of columns) make(line, "td", isMinor(plan, column) ? { class: "minor" } : {}, row.cells[column]);
  });
}

const radioOf = key => [...element("mechanisms").querySelectorAll("input")].find(radio => keyOf(shown.mechanisms[radio.value]) === key)
  ?? element("mechanisms").querySelector("input:checked");

function focusedRow() {
  const focused = document.activeElement;
  return shown && element("mechanisms").contains(focused) && focused.name === "mechanism" ? keyOf(shown.mechanisms[focused.value]) : null;
}

function choose(index) {
  chosen = index;
  picked = index === shown.recommended ? null : keyOf(shown.mechanisms[index]);
  element("mechanisms").querySelector(`input[value="${index}"]`).checked = true;
  showChoice(shown);
  document.dispatchEvent(new Event("chosen"));
}

function showChoice(plan) {
  [...element("mechanisms").tBodies[0].rows].forEach((line, index) => line.classList.toggle("chosen", index === chosen));
  showActions(plan, plan.mechanisms[chosen]);
  drawEpsilon(plan);
  drawPareto(plan);
  drawError(plan);
  drawCancellation(plan);
}

// The recommended mechanism, the chosen one where it is another, and DP-SGD.
function compared(plan) {
  const rows = [{ row: plan.mechanisms[plan.recommended], kind: "recommended" }];
  if (chosen !== plan.recommended) rows.push({ row: plan.mechanisms[chosen], kind: "chosen" });
  const label = `DP-SGD, ${plan.baseline.sampling} batches${plan.baseline_estimated ? " (estimated)" : ""}`;
  rows.push({ row: { ...plan.baseline, label }, kind: "dpsgd" });
  return rows;
}

function drawEpsilon(plan) {
  const series = compared(plan).flatMap(({ row, kind }) => {
    const standing = row.certified ? "guarantee" : "estimated, not certified";
    const at = { name: `${row.label}, as planned (${standing})`, kind, dots: true, sure: row.certified, sigma: [row.cells["σ"]], x: [row.planned.epsilon], y: [row.rmse] };
    if (kind === "dpsgd") at.name = `${row.label}, at the planned ε`;
    if (!row.epsilon) return [at];
    const sure = row.epsilon.guaranteed, order = row.epsilon.y.map((_, i) => i).sort((i, j) => row.epsilon.y[i] - row.epsilon.y[j]);
    const noise = order.map(i => row.epsilon.x[i]);
    return [{
      name: `${row.label} at other ε (${sure ? "guarantee" : "estimated, not certified"})`, kind, line: true, sure, sigma: noise.map(show),
      x: order.map(i => row.epsilon.y[i]), y: noise.map(value => value * row.unit_rmse),
    }, at];
  });
  drawChart(element("epsilon"), {
    title: series.every(s => s.sure || !s.line || s.kind === "dpsgd") ? "Error against ε" : "Error against ε (other ε: estimated, not certified)", xLabel: "ε (smaller is more private)", yLabel: "RMSE", xScale: "log", yScale: "log", series,
    describe: (s, i) => s.sure ? `ε = ${show(s.x[i])} is guaranteed with noise multiplier ${s.sigma[i]}: RMSE ${show(s.y[i])} (${s.name})`
      : `About RMSE ${show(s.y[i])} at ε = ${show(s.x[i])}, with noise multiplier ${s.sigma[i]} (${s.name}): estimated, not certified`,
  });
  const row = plan.mechanisms[chosen];
  if (!row.epsilon) make(element("epsilon"), "p", { class: "fine" },
    `With random batches every other ε has to be estimated, which takes seconds. That is done for the recommended row${DATA.live ? " after the search" : ""}.`);
}

function drawPareto(plan) {
  const kindOf = i => i === plan.recommended ? "recommended" : i === chosen ? "chosen" : "";
  const dots = (name, kind) => {
    const at = [...plan.mechanisms.keys()].filter(i => kindOf(i) === kind), rows = at.map(i => plan.mechanisms[i]);
    return { name: name(rows), kind, rows, dots: true, x: rows.map(row => row.buffers), y: rows.map(row => row.rmse), onPick: i => choose(at[i]) };
  };
  const best = plan.frontier.map(i => plan.mechanisms[i]), most = Math.max(...plan.mechanisms.map(row => row.buffers), 1);
  if (best.at(-1).buffers < most) best.push({ ...best.at(-1), at: most });
  const frontier = {
    name: "best at this memory", kind: "frontier", line: true, steps: true, rows: best,
    x: best.map(row => row.at ?? row.buffers), y: best.map(row => row.rmse),
  };
  const bound = { name: "best possible without amplification", kind: "bound", line: true, x: [0, most], y: [plan.lower_bound, plan.lower_bound] };
  drawChart(element("pareto"), {
    title: "RMSE by memory", xLabel: "model-sized buffers", yLabel: "RMSE", xScale: "count", yScale: "log",
    series: [frontier, bound, dots(() => "other mechanisms", ""), dots(rows => rows[0]?.label, "chosen"), dots(rows => rows[0]?.label, "recommended")],
    describe: (s, i) => s.rows
      ? `${s.rows[i].label}: RMSE ${s.rows[i].cells.RMSE} with ${s.rows[i].cells.mem} buffers${s.rows[i].certified ? "" : " (estimated)"}`
      : `The best possible RMSE without amplification is ${show(plan.lower_bound)}`,
  });
}

function drawError(plan) {
  drawChart(element("error"), {
    title: "Error after each step", xLabel: "step", yLabel: "standard deviation", xScale: "linear", yScale: "log",
    series: compared(plan).map(({ row, kind }) => ({ name: row.label, kind, line: true, ...row.error })),
    describe: (s, i) => `${s.name}: after step ${show(s.x[i])} the noise in the model has standard deviation ${show(s.y[i])} per unit of clip norm`,
  });
}

function drawCancellation(plan) {
  const series = compared(plan).flatMap(({ row, kind }) => row.cancellation.slice(0, kind === "dpsgd" ? 1 : undefined)
    .map(curve => ({ name: row.cancellation.length > 1 ? `${row.label}, noise of step ${show(curve.start)}` : row.label, kind, line: true, ...curve })));
  drawChart(element("cancellation"), {
    title: "How much of one step’s noise remains", xLabel: "steps it has been in the model", yLabel: "weight in the model (1: as drawn)",
    xScale: "log", yScale: "linear", series,
    describe: (s, i) => `${s.name}: the noise drawn at step ${show(s.start)} has weight ${show(s.y[i])} in the model after ${show(s.x[i])} step${s.x[i] === 1 ? "" : "s"}`,
  });
}
