// A log's content (quell.show.watching) into the page. Text only ever becomes text nodes.

const found = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);

at("setup").textContent = found.setup;
for (const card of found.cards) {
  const item = make(at("cards"), "li", { class: card.private ? "exposed" : "" });
  make(item, "p", {}, card.name);
  make(item, "strong", {}, card.value);
  make(item, "p", { class: "fine" }, card.note);
}
for (const note of found.notes) make(at("notes"), "li", {}, note);

function chart(id, title, yLabel, yScale, lines) {
  const series = lines.filter(([column]) => column in found.curves);
  at(id).hidden = !series.length;
  if (series.length) drawChart(at(id), {
    title, xLabel: "step", yLabel, xScale: "linear", yScale, empty: "Nothing yet.",
    describe: (s, i) => `${s.name}, step ${show(s.x[i])}: ${show(s.y[i])}`,
    series: series.map(([column, name, kind]) => ({ name, kind, line: true, ...found.curves[column] })),
  });
}

chart("ratio", "Noise to signal, where the gradient shows", "times", "log", [["noise_to_signal", "noise / gradient", "recommended"]]);
chart("norms", "What is released", "norm of a mean gradient", "log",
  [["gradient_norm", "gradient with noise", "recommended"], ["noise_norm", "expected of the noise", "dpsgd"]]);
chart("epsilon", "ε so far, at most", "ε", "linear", [["epsilon_at_most", "ε of all steps so far, at most", "recommended"]]);
chart("times", "Time of a step", "seconds", "log", [["step_seconds", "step", "recommended"], ["noise_seconds", "its noise", "dpsgd"]]);
chart("clipped", "NOT PRIVATE: share of clipped gradients", "share", "linear", [["clipped_share_not_private", "clipped", "dpsgd"]]);
chart("median", "NOT PRIVATE: median norm before clipping", "norm", "log", [["median_norm_not_private", "median norm", "dpsgd"]]);

if (found.refresh) setTimeout(() => location.reload(), 1000 * found.refresh);
