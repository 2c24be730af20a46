"use strict";
// A plan's content (quell.show.page.content) into the page. Text only ever becomes text nodes.

const element = id => document.getElementById(id);
let chosen = 0; // index of the mechanism whose curves are shown
let picked = null; // the family a person picked, kept while the plan changes

function showPlan(plan) {
  const again = plan.mechanisms.findIndex(row => row.family === picked);
  chosen = again < 0 ? plan.recommended : again;
  element("plan").hidden = false;
  element("setup").textContent = plan.setup;
  element("legend").textContent = plan.legend;
  fill("answer", plan.recommendation, "p");
  fill("notes", plan.notes, "li");
  element("privacy").replaceChildren();
  for (const { title, text } of plan.privacy) {
    make(element("privacy"), "dt", {}, title);
    make(element("privacy"), "dd", {}, text);
  }
  showTable(plan);
  showChoice(plan);
}

function fill(id, lines, tag) {
  element(id).replaceChildren();
  for (const line of lines) make(element(id), tag, {}, line);
}

const COLUMNS = [
  ["σ", row => row.certified ? row.sigma : `≈ ${row.sigma}`], ["RMSE", row => show(row.rmse)], ["MaxSE", row => show(row.maxse)], ["train", row => show(row.training)],
  ["gain", (row, plan) => `${plan.baseline_estimated || !row.certified ? "≈ " : ""}${row.gain.toPrecision(3)}×`],
  ["mem", row => row.buffers.toLocaleString("en")], ["draws", row => row.draws.toLocaleString("en")],
  ["batches", row => row.sampling], ["noise is", row => row.certified ? "certified" : "estimated"],
];

function showTable(plan) {
  const table = element("mechanisms");
  table.replaceChildren();
  const head = make(make(table, "thead"), "tr");
  for (const title of ["mechanism", ...COLUMNS.map(column => column[0])]) make(head, "th", { scope: "col" }, title);
  const body = make(table, "tbody");
  plan.mechanisms.forEach((row, index) => {
    const line = make(body, "tr");
    if (index === plan.recommended) line.classList.add("recommended");
    if (!row.fits) line.classList.add("beyond");
    const label = make(make(line, "td"), "label");
    const radio = make(label, "input", { type: "radio", name: "mechanism", value: index });
    radio.checked = index === chosen;
    radio.addEventListener("change", () => choose(plan, index));
    label.append(` ${row.label}${index === plan.recommended ? " (recommended)" : row.fits ? "" : " (beyond limits)"}`);
    for (const [, text] of COLUMNS) make(line, "td", {}, text(row, plan));
  });
}

function choose(plan, index) {
  chosen = index;
  picked = index === plan.recommended ? null : plan.mechanisms[index].family;
  const radio = element("mechanisms").querySelector(`input[value="${index}"]`);
  radio.checked = true;
  showChoice(plan);
}

function showChoice(plan) {
  [...element("mechanisms").tBodies[0].rows].forEach((line, index) => line.classList.toggle("chosen", index === chosen));
  fill("details", [`${plan.mechanisms[chosen].label}:`, ...plan.mechanisms[chosen].details], "p");
  drawPareto(plan);
  drawError(plan);
  drawCancellation(plan);
  drawEpsilon(plan);
}

// The recommended mechanism, the chosen one where it is another, and DP-SGD.
function compared(plan) {
  const rows = [{ row: plan.mechanisms[plan.recommended], kind: "recommended" }];
  if (chosen !== plan.recommended) rows.push({ row: plan.mechanisms[chosen], kind: "chosen" });
  const label = `DP-SGD, ${plan.baseline.sampling} batches${plan.baseline_estimated ? " (estimated)" : ""}`;
  rows.push({ row: { ...plan.baseline, label }, kind: "dpsgd" });
  return rows;
}

function drawPareto(plan) {
  const kindOf = i => i === plan.recommended ? "recommended" : i === chosen ? "chosen" : "";
  const dots = (name, kind) => {
    const at = [...plan.mechanisms.keys()].filter(i => kindOf(i) === kind), rows = at.map(i => plan.mechanisms[i]);
    return { name: name(rows), kind, rows, dots: true, x: rows.map(row => row.buffers), y: rows.map(row => row.rmse), onPick: i => choose(plan, at[i]) };
  };
  const best = plan.frontier.map(i => plan.mechanisms[i]), most = Math.max(...plan.mechanisms.map(row => row.buffers), 1);
  if (best.at(-1).buffers < most) best.push({ ...best.at(-1), at: most });
  const frontier = {
    name: "best at this memory", kind: "frontier", line: true, steps: true, rows: best,
    x: best.map(row => row.at ?? row.buffers), y: best.map(row => row.rmse),
  };
  const bound = { name: "best possible without amplification", kind: "bound", line: true, x: [0, most], y: [plan.lower_bound, plan.lower_bound] };
  drawChart(element("pareto"), {
    title: "Error by memory", xLabel: "model-sized buffers", yLabel: "RMSE", xScale: "count", yScale: "log",
    series: [dots(() => "other mechanisms", ""), dots(rows => rows[0]?.label, "recommended"), dots(rows => rows[0]?.label, "chosen"), frontier, bound],
    describe: (s, i) => s.rows
      ? `${s.rows[i].label}: RMSE ${show(s.rows[i].rmse)} with ${s.rows[i].buffers.toLocaleString("en")} buffers${s.rows[i].certified ? "" : " (estimated)"}`
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

function drawEpsilon(plan) {
  const row = plan.mechanisms[chosen], kind = chosen === plan.recommended ? "recommended" : "chosen";
  const standing = row.certified ? "guarantee" : "estimated, not certified";
  const planned = { name: `${row.label}, as planned (${standing})`, kind, dots: true, sure: row.certified, x: [row.planned.sigma], y: [row.planned.epsilon] };
  const series = [planned];
  const sure = row.epsilon?.guaranteed;
  if (row.epsilon) series.push({
    name: `${row.label}, ${sure ? "guarantee" : "estimated, not certified"}`, kind: sure ? kind : "frontier", line: true, sure, ...row.epsilon,
  });
  drawChart(element("epsilon"), {
    title: row.epsilon && !sure ? "ε for other noise (estimated, not certified)" : "ε as a function of the noise σ",
    xLabel: "noise multiplier σ", yLabel: "ε", xScale: "log", yScale: "log", series,
    describe: (s, i) => s.sure ? `Noise multiplier ${s.x[i]} guarantees ε = ${s.y[i]}`
      : `About ε = ${show(s.y[i])} with noise multiplier ${show(s.x[i])}: estimated, not certified`,
  });
  if (!row.epsilon) make(element("epsilon"), "p", { class: "fine" },
    "With random batches only the planned noise is certified. quell plan --html also estimates ε for other noise, for the recommended mechanism.");
}

const DATA = JSON.parse(element("data").textContent);
if (DATA.plan) showPlan(DATA.plan);
