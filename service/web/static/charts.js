// Curves by plotly. A chart requests its range in its own width, and again at each zoom, so that it
// never holds more points than it can show. All charts of a page share one range and axis.
// What a person chooses (axis, smoothing, which charts) is kept in this browser.

const root = document.documentElement;
const params = new URLSearchParams(location.search);
const shared = { start: whole(params.get("from")), end: whole(params.get("to")) };
const STORE = `charts:${document.body.dataset.run ? "run" : "compare"}`;
const chosen = { axis: "step", smooth: 0, hidden: [], added: [], ...recall() };
if (shared.start !== null || shared.end !== null) chosen.axis = "step"; // an address names steps
const hiddenNames = new Set();
const charts = [];
const AXES = { step: "steps", epoch: "epochs", time: "seconds" };
const SYMBOLS = { nan: "x-thin", inf: "triangle-up", "-inf": "triangle-down" };
const WORDS = { nan: "not a number", inf: "infinite", "-inf": "minus infinite" };

function whole(text) {
  return text === null || text.trim() === "" || !Number.isFinite(+text) ? null : Math.round(+text);
}

function real(text) {
  return text.trim() === "" || !Number.isFinite(+text) ? null : +text;
}

function recall() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function keep(changes) {
  Object.assign(chosen, changes);
  try {
    localStorage.setItem(STORE, JSON.stringify(chosen));
  } catch { /* without storage, the choice lasts until the page is left */ }
}

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

async function ask(url, chart, signal, smooth) {
  const query = new URLSearchParams(chart.metrics.map((name) => ["metric", name]));
  if (shared.start !== null) query.set("start", shared.start);
  if (shared.end !== null) query.set("end", shared.end);
  if (chosen.axis !== "step") query.set("x", chosen.axis);
  if (smooth) query.set("smooth", smooth);
  query.set("width", Math.min(2000, Math.max(64, Math.round(chart.plot.clientWidth))));
  const answer = await fetch(`${url}?${query}`, { signal });
  if (!answer.ok) throw new Error((await answer.json()).detail);
  return answer.json();
}

// Update a chart; a newer request replaces one that is still running.
async function draw(chart) {
  if (!chart.isSeen) return;
  chart.waiting?.abort();
  chart.waiting = new AbortController();
  try {
    const { signal } = chart.waiting;
    const kinds = chosen.smooth ? [0, chosen.smooth] : [0];
    const asked = kinds.flatMap((smooth) => chart.sources.map(async (source) => {
      const answer = await ask(source.url, chart, signal, smooth);
      return makeTraces(chart, answer, source, kinds.length > 1 && !smooth);
    }));
    const told = await Promise.allSettled(asked);
    // In a chart that a person has added some runs may lack the number.
    const failed = told.find((one) => one.status === "rejected");
    if (failed && (failed.reason.name === "AbortError" || told.every((one) => one.reason))) throw failed.reason;
    chart.traces = told.flatMap((one) => one.value ?? []);
    await show(chart);
  } catch (error) {
    if (error.name !== "AbortError") complain(chart, error);
  }
}

// The measured curve is drawn faintly behind the smoothed one.
function makeTraces(chart, answer, source, isFaint) {
  const isOne = !chart.isOverlay;
  return answer.curves.flatMap((curve, i) => {
    const ink = colour(`--c${(isOne ? i : source.ink) % 8}`);
    const name = isOne ? curve.metric.replace(/^[a-z]+\./, "") : source.name;
    const line = {
      type: "scatter", mode: curve.steps.length < 40 ? "lines+markers" : "lines", name,
      x: curve.x.length ? curve.x : curve.steps, y: curve.values, line: { color: ink, width: 1.6 }, marker: { size: 4 },
      visible: !hiddenNames.has(name), hovertemplate: `%{y:.6~g} <b>${escape(name)}</b><extra></extra>`,
    };
    if (isFaint) Object.assign(line, { opacity: 0.25, hoverinfo: "skip", hovertemplate: null });
    const nonfinite = isFaint ? [] : Object.entries(curve.x.length ? curve.nonfinite_x : curve.nonfinite);
    const marks = nonfinite.map(([word, steps]) => ({
      type: "scatter", mode: "markers", yaxis: "y2", visible: line.visible, x: steps, name: `${name}: ${WORDS[word]}`,
      y: steps.map(() => (word === "inf" ? 0.97 : 0.03)),
      marker: { symbol: SYMBOLS[word], size: 9, color: colour("--bad"), line: { width: 2, color: colour("--bad") } },
      hovertemplate: `${WORDS[word]} <b>${escape(name)}</b><extra></extra>`,
    }));
    return [line, ...marks];
  });
}

function escape(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/%\{/g, "% {");
}

function makeLayout(chart) {
  const muted = colour("--muted"), grid = colour("--grid");
  const axis = { gridcolor: grid, zeroline: false, tickfont: { size: 11, color: muted }, linecolor: grid };
  const layout = {
    height: chart.plot.clientHeight, margin: { l: 48, r: 10, t: 8, b: 26 }, showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", dragmode: "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour("--text") },
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--strong-line"), font: { size: 12, color: colour("--text") } },
    xaxis: { ...axis, nticks: 6, tickformat: ",d", hoverformat: ",d", unifiedhovertitle: { text: "step %{x:,d}" }, spikecolor: colour("--strong-line"), spikethickness: 1 },
    yaxis: { ...axis, fixedrange: true, nticks: 5, type: chart.isLog ? "log" : "linear", tickformat: "~g", exponentformat: "power" },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
  const low = shared.start ?? chart.first, high = shared.end ?? chart.last;
  if (shared.start !== null || shared.end !== null) layout.xaxis.range = [low, high];
  if (chosen.axis !== "step") {
    const unit = chosen.axis === "time" ? " s" : "";
    Object.assign(layout.xaxis, { tickformat: "~g", ticksuffix: unit, hoverformat: ".4~g", unifiedhovertitle: { text: `${chosen.axis} %{x:.4~g}${unit}` } });
    return layout;
  }
  // Steps are whole numbers: plotly would mark halves and write them as the same number twice.
  if (high - low < 6) Object.assign(layout.xaxis, { tick0: 0, dtick: 1 });
  return layout;
}

async function show(chart) {
  const all = chart.traces.flatMap((one) => (one.x.length ? [one.x[0], one.x.at(-1)] : []));
  [chart.first, chart.last] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
  const config = { displayModeBar: false, responsive: true, showTips: false, doubleClick: false };
  if (!chart.isDrawn) chart.plot.replaceChildren();
  await Plotly.react(chart.plot, chart.traces, makeLayout(chart), config);
  if (!chart.isDrawn) {
    chart.plot.on("plotly_relayout", (change) => {
      const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"];
      if (low === undefined) return;
      setRange(...(chosen.axis === "step" ? [Math.floor(low), Math.ceil(high)] : [low, high]));
    });
    chart.plot.on("plotly_doubleclick", () => setRange(null, null));
  }
  chart.isDrawn = true;
  chart.figure.dataset.drawn = `${shared.start ?? ""}-${shared.end ?? ""}`;
  performance.mark("chart-drawn");
}

function complain(chart, error) {
  const line = document.createElement("p");
  line.className = "say warn";
  line.textContent = `The curve cannot be shown: ${error.message}`;
  if (!chart.isDrawn) chart.plot.replaceChildren(line);
}

// Show this part of the axis in all charts; null: from the beginning, or to the end.
function setRange(start, end) {
  if (start !== null && end !== null && end <= start) end = start + (chosen.axis === "step" ? 1 : 1e-6);
  if (start === shared.start && end === shared.end) return;
  Object.assign(shared, { start: start === null ? null : Math.max(0, start), end });
  const form = document.querySelector("form[data-range]");
  if (form) {
    for (const [name, value] of [["from", shared.start], ["to", shared.end]]) {
      form.elements[name].value = value === null ? "" : +value.toPrecision(6);
    }
    form.querySelector("[data-whole]").hidden = shared.start === null && shared.end === null;
  }
  charts.forEach(draw);
}

function prepare(figure) {
  document.querySelector("[data-hint]")?.removeAttribute("hidden");
  const chart = {
    figure, plot: figure.querySelector(".plot"), metrics: JSON.parse(figure.dataset.metrics),
    sources: JSON.parse(figure.dataset.sources), traces: [], isDrawn: false, isSeen: false,
    isLog: figure.dataset.log === "yes", isOverlay: "overlay" in figure.dataset,
  };
  figure.querySelectorAll(".keys [data-name]").forEach(prepareKey);
  const button = figure.querySelector("[data-scale]");
  button?.addEventListener("click", () => {
    chart.isLog = !chart.isLog;
    button.setAttribute("aria-pressed", String(chart.isLog));
    if (chart.isDrawn) show(chart);
  });
  if (button) button.hidden = false;
  charts.push(chart);
  return chart;
}

// The name of a curve hides it, in all charts of the page.
function prepareKey(item) {
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-pressed", "true");
  button.title = "hide or show it in all charts";
  button.replaceChildren(...item.childNodes);
  item.append(button);
  button.addEventListener("click", () => {
    const name = item.dataset.name, isShown = hiddenNames.delete(name) || !hiddenNames.add(name);
    document.querySelectorAll(".keys [data-name]").forEach((one) => {
      if (one.dataset.name === name) one.firstChild.setAttribute("aria-pressed", String(isShown));
    });
    charts.forEach(draw);
  });
}

// How curves are drawn, and which charts there are.
function prepareBoard(board) {
  board.hidden = false;
  const axis = board.querySelector("[data-axis]"), smooth = board.querySelector("[data-smooth]");
  axis.value = chosen.axis;
  smooth.value = String(chosen.smooth);
  axis.addEventListener("change", () => {
    keep({ axis: axis.value });
    nameAxis();
    Object.assign(shared, { start: NaN, end: NaN }); // another unit: not the range that was shown
    setRange(null, null);
  });
  smooth.addEventListener("change", () => {
    keep({ smooth: Number(smooth.value) });
    charts.forEach(draw);
  });
  nameAxis();
  chosen.added.forEach((metric) => addChart(metric));
  const menu = board.querySelector("details");
  menu.addEventListener("toggle", () => menu.open && fillMenu(menu.querySelector("ul")));
  showChosenCharts();
}

function nameAxis() {
  const form = document.querySelector("form[data-range]");
  if (!form) return;
  form.querySelector("label").textContent = AXES[chosen.axis][0].toUpperCase() + AXES[chosen.axis].slice(1);
  [form.elements.from, form.elements.to].forEach((one) => one.removeAttribute("pattern"));
}

function showChosenCharts() {
  document.querySelectorAll("figure[data-title]").forEach((figure) => {
    figure.hidden = chosen.hidden.includes(figure.dataset.title);
  });
  document.querySelector("[data-added]").hidden = !document.querySelector("[data-added] figure");
  dispatchEvent(new Event("resize")); // the others have another width now
}

async function fillMenu(list) {
  const titles = [...document.querySelectorAll("figure[data-title]")].map((one) => one.dataset.title);
  const known = new Set(charts.flatMap((chart) => chart.metrics));
  const asked = charts[0].sources.slice(0, 8).map(async ({ url }) => (await (await fetch(url.replace(/series$/, "metrics"))).json()).keys ?? []);
  const more = [...new Set((await Promise.all(asked)).flat())].filter((name) => !known.has(name));
  list.replaceChildren(...[...titles, ...more].map((title) => {
    const item = document.createElement("li"), label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.checked = titles.includes(title) && !chosen.hidden.includes(title);
    label.append(box, ` ${title}`);
    item.append(label);
    box.addEventListener("change", () => chooseChart(title, box.checked));
    return item;
  }));
}

function chooseChart(title, isShown) {
  const figure = document.querySelector(`figure[data-title="${CSS.escape(title)}"]`);
  const isAdded = chosen.added.includes(title);
  if (isShown && !figure) addChart(title);
  if (!isShown && isAdded) figure?.remove();
  const without = (names) => names.filter((name) => name !== title);
  keep({
    hidden: isShown || isAdded ? without(chosen.hidden) : [...chosen.hidden, title],
    added: isShown && (!figure || isAdded) ? [...without(chosen.added), title] : without(chosen.added),
  });
  showChosenCharts();
}

// A chart of one more number, of the same runs.
function addChart(metric) {
  const model = document.querySelector("[data-chart]");
  if (!model || charts.some((one) => one.metrics.includes(metric))) return;
  const figure = model.cloneNode(true);
  figure.dataset.title = metric;
  figure.dataset.metrics = JSON.stringify([metric]);
  figure.removeAttribute("data-drawn");
  figure.setAttribute("aria-label", `${metric} over ${AXES[chosen.axis]}`);
  figure.querySelector("figcaption").firstChild.textContent = metric;
  figure.querySelector("[data-scale]").setAttribute("aria-label", `logarithmic scale of ${metric}`);
  figure.querySelectorAll("figcaption small, .edge, svg, .js-plotly-plot > *").forEach((one) => one.remove());
  figure.querySelector(".plot").replaceChildren();
  if (!("overlay" in figure.dataset)) figure.querySelector(".keys")?.remove();
  figure.querySelectorAll(".keys button").forEach((one) => one.replaceWith(...one.childNodes));
  const section = document.querySelector("[data-added]");
  section.hidden = false;
  section.querySelector(".charts").append(figure);
  seen.observe(prepare(figure).figure);
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find((one) => one.figure === entry.target);
    if (!entry.isIntersecting || chart.isSeen) continue;
    chart.isSeen = true;
    draw(chart);
  }
}, { rootMargin: "300px" });
document.querySelectorAll("[data-chart]").forEach((figure) => seen.observe(prepare(figure).figure));
const board = document.querySelector("[data-board]");
if (board) prepareBoard(board);
document.querySelector("form[data-range]")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const { from, to } = event.target.elements;
  if (event.submitter?.hasAttribute("data-whole")) setRange(null, null);
  else setRange(...[from, to].map((one) => (chosen.axis === "step" ? whole(one.value) : real(one.value))));
});
document.addEventListener("runs-changed", () => charts.forEach(draw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));
