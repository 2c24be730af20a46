"use strict";
// quell serve: sliders that ask for a plan. A preview follows the slider; the full plan follows when the slider rests.
// What is asked stands in the address, so that it can be kept and shared.

const REST = 350; // milliseconds without movement before the full plan is asked for
const DONE = "All mechanisms compared.";

function startLive(live) {
  const form = element("controls");
  form.hidden = false;
  const still = make(form, "div", { class: "panel" }), moving = make(form, "div", { class: "panel", id: "sliders" });
  addPresets(still, live, moved);
  const more = make(still, "details", { id: "more" }), title = make(more, "summary"), rest = make(more, "div", { class: "fields" });
  const main = make(moving, "div", { class: "fields" });
  for (const control of live.controls) addControl(control.stops ? main : rest, form, control);
  const working = make(moving, "div", { id: "working" });
  const status = make(working, "p", { id: "status", role: "status" });
  const bar = make(working, "progress", { "aria-label": "Search" });
  const stop = action("stop", "Cancel", () => { stopped("Stopped. What is shown is complete as it stands."); again.hidden = false; }, working);
  const again = action("again", "Search again", () => moved(), working);
  again.hidden = true;
  let pending = new AbortController();

  const address = new URLSearchParams(location.search);
  for (const control of live.controls) if (address.has(control.name)) setValue(form, control, address.get(control.name));
  picked = address.get("row");

  function inputs() {
    const query = new URLSearchParams();
    for (const control of live.controls) query.set(control.name, valueOf(form, control));
    return query;
  }

  function keepAddress() {
    const query = inputs();
    if (picked) query.set("row", picked);
    history.replaceState(null, "", `?${query}`);
  }

  // Ask the server and hear every line of its answer.
  async function ask(extra, signal, hear) {
    const query = inputs();
    for (const [name, value] of Object.entries(extra)) query.set(name, value);
    const response = await fetch(`/plan?${query}`, { signal });
    if (!response.ok) throw fault(await response.json());
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = "", part; !(part = await reader.read()).done;) {
      const lines = (text + part.value).split("\n");
      text = lines.pop();
      for (const line of lines) {
        signal.throwIfAborted();
        const message = JSON.parse(line);
        if (message.error) throw fault(message);
        if (!message.progress) hear(message);
        else if (extra.kind !== "draft") showProgress(message.progress);
      }
    }
  }

  const fault = ({ error, field }) => Object.assign(new Error(error), { field });

  function say(text, failed = false) {
    status.textContent = text;
    status.classList.toggle("failed", failed);
  }

  function showProgress({ what, seconds, expected }) {
    if (document.body.dataset.kind === "full") return say(`${DONE} Now ${what}…`);
    if (expected) {
      bar.max = Math.max(expected, 1.1 * seconds);
      bar.value = seconds;
    } else bar.removeAttribute("value");
    const left = expected > seconds ? `, of about ${duration(expected)}` : "";
    say(`Preview shown. Now ${what}: ${duration(seconds)}${left}.`);
  }

  function busy(yes) {
    bar.hidden = stop.hidden = !yes;
    if (yes) bar.removeAttribute("value");
  }

  function stopped(text) {
    pending.abort();
    busy(false);
    say(text);
  }

  async function attempt(work) {
    pending.abort();
    pending = new AbortController();
    const { signal } = pending;
    again.hidden = true;
    busy(true);
    mark(null);
    try {
      await work(signal);
      busy(false);
    } catch (problem) {
      if (signal.aborted) return;
      busy(false);
      element("plan").classList.add("stale");
      mark(problem.field, problem.message);
      say(problem instanceof TypeError ? "The server does not answer: is quell serve still running?" : problem.message, true);
    }
  }

  // The field that a refusal is about, and the sentence beside it.
  function mark(name, message) {
    for (const old of form.querySelectorAll("[aria-invalid]")) {
      old.removeAttribute("aria-invalid");
      old.removeAttribute("aria-errormessage");
    }
    for (const old of form.querySelectorAll(".fault")) old.remove();
    const field = name && form.elements[name];
    if (!field) return;
    if (more.contains(field)) more.open = true;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-errormessage", `fault-${name}`);
    make(field.parentNode, "p", { class: "hint fault", id: `fault-${name}`, role: "alert" }, message);
  }

  function received(plan, kind) {
    document.body.dataset.kind = kind;
    showPlan(plan);
    form.elements.delta.placeholder = plan.delta;
    title.textContent = `More: ${valueOf(form, { name: "examples" })} examples, δ = ${plan.delta}, ${valueOf(form, { name: "optimizer" })}, batches: ${valueOf(form, { name: "sampling" })}`;
    element("plan").classList.remove("stale");
  }

  function moved() {
    keepAddress();
    element("plan").classList.add("stale");
    attempt(async signal => {
      say("Computing a preview…");
      await ask({ kind: "draft" }, signal, ({ plan }) => received(plan, "draft"));
      say("Preview: simple mechanisms, fixed batches. Full search running…");
      await new Promise(resolve => { setTimeout(resolve, REST); });
      signal.throwIfAborted();
      await ask({ kind: "full" }, signal, ({ plan }) => {
        received(plan, "full");
        say(DONE);
      });
      say(DONE);
    });
  }

  document.addEventListener("chosen", keepAddress);
  document.addEventListener("certify", () => attempt(async signal => {
    const plan = shown, index = chosen, row = plan.mechanisms[index];
    say(`${DONE} Now certifying ${row.label}…`);
    await ask({ kind: "certify", mechanism: row.label }, signal, answer => {
      plan.mechanisms[index] = { ...answer.row, fits: row.fits };
      picked = keyOf(plan.mechanisms[index]);
      showPlan(plan);
      tell(`Certified ${row.label}: noise multiplier ${answer.row.sigma}. Download plan.json to train with it.`);
    });
    say(DONE);
  }));
  form.addEventListener("input", event => event.target.name !== "preset" && moved());
  form.addEventListener("submit", event => event.preventDefault());
  title.textContent = "More settings";
  moved();
}

function duration(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} minutes`;
}

function addPresets(parent, live, moved) {
  const box = make(parent, "div");
  make(box, "label", { for: "control-preset" }, "Start from");
  const select = make(box, "select", { id: "control-preset", name: "preset" });
  for (const name of ["your own numbers", ...Object.keys(live.presets)]) make(select, "option", { value: name }, name);
  select.addEventListener("change", () => {
    const values = live.presets[select.value];
    if (!values) return;
    for (const control of live.controls) setValue(select.form, control, values[control.name]);
    moved();
  });
}

function addControl(parent, form, control) {
  const box = make(parent, "div"), id = `control-${control.name}`;
  const label = make(box, "label", { for: id }, control.label);
  if (control.options) {
    const select = make(box, "select", { id, name: control.name });
    for (const option of control.options) make(select, "option", { value: option }, option);
  } else if (control.stops) {
    make(label, "output", { for: id, id: `value-${control.name}` });
    const slider = make(box, "input", { id, name: control.name, type: "range", min: 0, step: 1 });
    slider.addEventListener("input", () => readSlider(form, control));
  } else {
    make(box, "input", { id, name: control.name, inputmode: "text", autocomplete: "off", "aria-describedby": `hint-${control.name}` });
    make(box, "p", { class: "hint", id: `hint-${control.name}` }, control.hint);
  }
  setValue(form, control, control.value);
}

function readSlider(form, control) {
  const text = Number(valueOf(form, control)).toLocaleString("en"), output = element(`value-${control.name}`);
  output.textContent = text === "NaN" ? valueOf(form, control) : text;
  form.elements[control.name].setAttribute("aria-valuetext", output.textContent);
}

function setValue(form, control, value) {
  const field = form.elements[control.name];
  if (!control.stops) return void (field.value = value);
  let at = control.stops.findIndex(stop => String(stop) === String(value));
  if (at < 0) { // between two stops
    at = control.stops.findIndex(stop => !(Number(stop) < Number(value)));
    at = at < 0 ? control.stops.length : at;
    control.stops.splice(at, 0, value);
  }
  field.max = control.stops.length - 1;
  field.value = at;
  readSlider(form, control);
}

function valueOf(form, control) {
  const { value } = form.elements[control.name];
  return control.stops ? control.stops[value] : value;
}

if (DATA.live) startLive(DATA.live);
