"use strict";
// Small line charts as inline SVG. A chart is drawn anew whenever its data or the width of the window change.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 300, LEFT = 64, RIGHT = 14, TOP = 10, BOTTOM = 44;
const REACH = 28; // pixels around a point in which a click picks it

function make(parent, tag, attributes = {}, text = null) {
  const node = parent.namespaceURI === SVG || tag === "svg"
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

// As quell.show.words.amount: four digits, powers of ten where numbers are very small or large.
function show(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) {
    const [mantissa, exponent] = value.toExponential(3).split("e");
    const power = `10${String(Number(exponent)).replace(/./g, c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])}`;
    return Number(mantissa) === 1 ? power : `${Number(mantissa)}·${power}`;
  }
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 10 });
}

// Scales turn a value into something linear: "count" is a logarithm that has room for zero.
const SCALES = {
  linear: { to: v => v, from: v => v },
  log: { to: v => Math.log10(v), from: v => 10 ** v },
  count: { to: v => Math.log10(1 + v), from: v => 10 ** v - 1 },
};

function axis(kind, values, start, end) {
  const scale = SCALES[kind];
  let low = scale.to(Math.min(...values)), high = scale.to(Math.max(...values));
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  low -= margin; high += margin;
  let ticks = kind === "linear" ? linearTicks(low, high) : logTicks(scale.from(low), scale.from(high), kind);
  if (ticks.length < 3 && kind === "log") ticks = linearTicks(scale.from(low), scale.from(high));
  return { place: value => start + (scale.to(value) - low) / (high - low) * (end - start), ticks };
}

function linearTicks(low, high) {
  const rough = (high - low) / 7, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, kind) {
  const decades = Math.log10(Math.max(high, 1e-300) / Math.max(low, kind === "count" ? 1 : 1e-300));
  const steps = decades > 4 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const ticks = kind === "count" && low <= 0 ? [0] : [];
  const least = Math.max(low, kind === "count" ? 1 : low);
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(high); power++)
    for (const step of steps) {
      const tick = Number((step * 10 ** power).toPrecision(12));
      if (tick >= least && tick <= high && (kind !== "count" || Number.isInteger(tick))) ticks.push(tick);
    }
  return ticks;
}

const drawn = new Map(); // figures, what they show, and how wide they were
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => drawn.forEach(({ spec, wide }, figure) => {
    if (figure.clientWidth !== wide) drawChart(figure, spec); // phones change the height while one scrolls
  }), 150);
});

// spec: {title, xLabel, yLabel, xScale, yScale, empty, describe(series, i),
//        series: [{name, kind, x, y, line, dots, steps, onPick(i)}]}
function drawChart(figure, spec) {
  drawn.set(figure, { spec, wide: figure.clientWidth });
  const focused = figure.contains(document.activeElement);
  figure.replaceChildren();
  const caption = make(figure, "figcaption", { id: `${figure.id}-title` }, spec.title);
  const series = spec.series.filter(s => s.x.length);
  if (!series.length) return void make(figure, "p", { class: "fine" }, spec.empty ?? "Nothing to show.");
  const width = Math.min(Math.max(figure.clientWidth - 24, 280), 560); // letters keep their size on a phone
  const svg = make(figure, "svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, class: "chart", role: "application", "aria-roledescription": "chart", tabindex: "0",
    "aria-labelledby": caption.id, "aria-describedby": `${figure.id}-readout`,
  });
  const x = axis(spec.xScale, series.flatMap(s => s.x), LEFT, width - RIGHT);
  const y = axis(spec.yScale, series.flatMap(s => s.y), HEIGHT - BOTTOM, TOP);
  drawFrame(svg, width, x, y, spec);
  const points = series.map(s => s.x.map((value, i) => [x.place(value), y.place(s.y[i])]));
  series.forEach((s, at) => drawSeries(svg, s, points[at]));
  drawLegend(figure, series);
  const readout = make(figure, "output", { class: "readout fine", id: `${figure.id}-readout`, "aria-live": "polite" });
  follow(svg, width, readout, series, points, spec.describe);
  if (focused) svg.focus({ preventScroll: true });
}

function drawFrame(svg, width, x, y, spec) {
  const bottom = HEIGHT - BOTTOM;
  let last = -Infinity;
  for (const tick of x.ticks) {
    const at = x.place(tick), text = show(tick);
    make(svg, "line", { class: "grid", x1: at, x2: at, y1: TOP, y2: bottom });
    if (at - last < 8 * text.length + 6) continue;
    make(svg, "text", { class: "tick-x", x: at, y: bottom + 16, "text-anchor": "middle" }, text);
    last = at;
  }
  last = Infinity;
  for (const tick of y.ticks) {
    const at = y.place(tick);
    make(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at });
    if (last - at < 14) continue;
    make(svg, "text", { class: "tick-y", x: LEFT - 6, y: at + 4, "text-anchor": "end" }, show(tick));
    last = at;
  }
  make(svg, "text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, spec.xLabel);
  const middle = (TOP + bottom) / 2;
  make(svg, "text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, spec.yLabel);
}

function drawSeries(svg, s, points) {
  if (s.line) {
    const path = points.map(([px, py], i) => `${i ? (s.steps ? `H${px.toFixed(1)}V` : "L") : "M"}`
      + `${i && s.steps ? py.toFixed(1) : `${px.toFixed(1)} ${py.toFixed(1)}`}`).join("");
    make(svg, "path", { class: `series ${s.kind}`, d: path });
  }
  if (s.dots) for (const [px, py] of points) make(svg, "circle", { class: `dot ${s.kind}`, cx: px, cy: py, r: s.kind ? 6 : 4.5 });
}

function drawLegend(figure, series) {
  const list = make(figure, "ul", { class: "legend" });
  for (const s of series) {
    const item = make(list, "li");
    const key = make(item, "svg", { viewBox: "0 0 30 10", "aria-hidden": "true" });
    if (s.line) make(key, "path", { class: `series ${s.kind}`, d: "M0 5H30" });
    if (s.dots) make(key, "circle", { class: `dot ${s.kind}`, cx: 15, cy: 5, r: 4.5 });
    item.append(` ${s.name}`);
  }
}

// The reading cursor: the point nearest to the pointer or the finger, or moved with the arrow keys.
function follow(svg, width, readout, series, points, describe) {
  const cursor = make(svg, "circle", { class: "cursor", r: 6, visibility: "hidden" });
  let at = 0, index = 0;
  const move = (newAt, newIndex) => {
    [at, index] = [newAt, newIndex];
    const [px, py] = points[at][index];
    for (const [name, value] of Object.entries({ cx: px, cy: py, visibility: "visible" })) cursor.setAttribute(name, value);
    readout.textContent = describe(series[at], index);
  };
  const nearest = (event, among = () => true) => {
    const box = svg.getBoundingClientRect();
    const px = (event.clientX - box.left) / box.width * width, py = (event.clientY - box.top) / box.height * HEIGHT;
    let best = { distance: Infinity };
    points.forEach((line, s) => among(series[s]) && line.forEach(([qx, qy], i) => {
      const distance = Math.hypot(qx - px, qy - py);
      if (distance < best.distance) best = { distance, s, i };
    }));
    return best;
  };
  for (const kind of ["pointerdown", "pointermove"]) svg.addEventListener(kind, event => {
    const { s, i } = nearest(event);
    move(s, i);
  });
  svg.addEventListener("click", event => {
    const { distance, s, i } = nearest(event, each => each.onPick);
    if (distance < REACH) series[s].onPick(i);
  });
  svg.addEventListener("focus", () => {
    if (svg.matches(":focus-visible")) move(at, Math.min(index, points[at].length - 1)); // by keyboard: a finger has read its point
  });
  svg.addEventListener("keydown", event => {
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key], hop = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const end = { Home: 0, End: points[at].length - 1 }[event.key];
    if (turn) move(at, Math.min(Math.max(index + turn, 0), points[at].length - 1));
    else if (end !== undefined) move(at, end);
    else if (hop) {
      const next = (at + hop + series.length) % series.length;
      move(next, Math.min(index, points[next].length - 1));
    } else if ((event.key === "Enter" || event.key === " ") && series[at].onPick) series[at].onPick(index);
    else return;
    event.preventDefault();
  });
}
