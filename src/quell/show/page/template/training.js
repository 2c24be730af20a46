// A comparison's content (quell.train.content) into the page. Text only ever becomes text nodes.

const found = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);

const several = found.arms.some(arm => arm.accuracies.length > 1);

at("setup").textContent = found.setup;
at("spread").hidden = !several;
for (const line of [found.verdict, `Promise of the planned run: ${found.promise}.`]) if (line) make(at("answer"), "p", {}, line);
at("explained-title").hidden = !Object.keys(found.explained).length;
for (const [title, text] of Object.entries(found.explained)) {
  make(at("explained"), "dt", {}, title);
  make(at("explained"), "dd", {}, text);
}
for (const note of found.notes) make(at("notes"), "li", {}, note);

const HEADINGS = {
  name: "training", mechanism: "mechanism", batches: "batches", sigma: "σ", rmse: "RMSE", learning_rate: "lr", accuracy: "test accuracy",
};
const head = make(make(at("arms"), "thead"), "tr"), body = make(at("arms"), "tbody");
const kindOf = key => ["name", "learning_rate", "accuracy"].includes(key) ? "" : "minor"; // a phone leaves minor columns out
for (const [key, title] of Object.entries(HEADINGS)) make(head, "th", { scope: "col", class: kindOf(key) }, title);
for (const arm of found.arms) {
  const row = make(body, "tr", { class: arm.name === "planned" ? "recommended" : "" });
  for (const key of Object.keys(HEADINGS)) make(row, "td", { class: kindOf(key) }, arm[key]);
}

drawChart(at("noise"), {
  title: "Noise in the model after each step", xLabel: "step", yLabel: "standard deviation / (lr · clip norm)",
  xScale: "linear", yScale: "log",
  describe: (s, i) => `${s.name}, step ${show(s.x[i])}: ${show(s.y[i])}`,
  series: found.arms.filter(arm => arm.noise).map(arm => ({ name: arm.name, kind: arm.kind, ...arm.noise, line: true })),
});
drawChart(at("accuracy"), {
  title: several ? "Test accuracy, mean of the runs" : "Test accuracy", xLabel: "epoch", yLabel: "%", xScale: "linear", yScale: "linear",
  describe: (s, i) => `${s.name}, epoch ${s.x[i]}: ${s.y[i].toFixed(1)}% (runs: ${s.runs.map(r => (100 * r[i]).toFixed(1)).join(", ")})`,
  series: found.arms.map(arm => ({
    name: arm.name, kind: arm.kind, line: true, runs: arm.accuracies,
    x: arm.curve.map((_, i) => i + 1), y: arm.curve.map(value => 100 * value),
  })),
});
