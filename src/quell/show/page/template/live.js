"use strict";
// quell serve: sliders that ask for a plan. A preview follows the slider; the full plan follows when the slider rests.

const REST = 350; // milliseconds without movement before the full plan is asked for

function startLive(live) {
  const form = element("controls"), status = element("status");
  const page = Array.from(crypto.getRandomValues(new Uint32Array(2)), n => n.toString(16)).join("");
  let pending = new AbortController(), timer = 0;
  form.hidden = status.hidden = false;
  for (const control of live.controls) addControl(form, control);

  async function ask(kind, signal) {
    const query = new URLSearchParams({ kind, page });
    for (const control of live.controls) query.set(control.name, valueOf(form, control));
    const response = await fetch(`/plan?${query}`, { signal, headers: { Accept: "application/json" } });
    const answer = await response.json();
    signal.throwIfAborted();
    if (!response.ok) throw new Error(answer.error);
    showPlan(answer.plan);
    element("plan").classList.remove("stale");
    document.body.dataset.kind = kind;
  }

  function say(text, failed = false) {
    status.textContent = text;
    status.classList.toggle("failed", failed);
  }

  async function attempt(work) {
    const { signal } = pending;
    try {
      await work(signal);
    } catch (problem) {
      if (signal.aborted) return;
      element("plan").classList.add("stale");
      say(problem instanceof TypeError ? "The server does not answer: is quell serve still running?" : problem.message, true);
    }
  }

  function moved() {
    pending.abort();
    pending = new AbortController();
    clearTimeout(timer);
    element("plan").classList.add("stale");
    say("Computing a preview…");
    attempt(async signal => {
      await ask("draft", signal);
      say("Preview: simple mechanisms, fixed batches. Full search running…");
      await new Promise(resolve => { timer = setTimeout(resolve, REST); });
      await ask("full", signal);
      say("All mechanisms compared.");
    });
  }

  form.addEventListener("input", moved);
  form.addEventListener("submit", event => event.preventDefault());
  moved();
}

function addControl(form, control) {
  const box = make(form, "div"), id = `control-${control.name}`;
  const label = make(box, "label", { for: id }, control.label);
  if (control.options) {
    const select = make(box, "select", { id, name: control.name });
    for (const option of control.options) make(select, "option", { value: option }, option);
    select.value = control.value;
  } else if (control.stops) {
    const output = make(label, "output", { for: id });
    const slider = make(box, "input", {
      id, name: control.name, type: "range", min: 0, max: control.stops.length - 1, step: 1, value: control.stops.indexOf(control.value),
    });
    const read = () => {
      output.textContent = valueOf(form, control);
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    slider.addEventListener("input", read);
    read();
  } else make(box, "input", { id, name: control.name, inputmode: "decimal", value: control.value, autocomplete: "off" });
}

function valueOf(form, control) {
  const { value } = form.elements[control.name];
  return control.stops ? control.stops[value] : value;
}

if (DATA.live) startLive(DATA.live);
