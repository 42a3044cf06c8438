// Curves by plotly. A chart asks the server for a range and its own width, and again at each zoom,
// so that it never holds more points than it can show. All charts of a page share one range.

const root = document.documentElement;
const params = new URLSearchParams(location.search);
const shared = { start: whole(params.get("from")), end: whole(params.get("to")) };
const charts = [];
const SYMBOLS = { nan: "x-thin", inf: "triangle-up", "-inf": "triangle-down" };
const WORDS = { nan: "not a number", inf: "infinite", "-inf": "minus infinite" };

function whole(text) {
  return text === null || text.trim() === "" || !Number.isFinite(+text) ? null : Math.round(+text);
}

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

async function ask(url, chart, signal) {
  const query = new URLSearchParams(chart.metrics.map((name) => ["metric", name]));
  if (shared.start !== null) query.set("start", shared.start);
  if (shared.end !== null) query.set("end", shared.end);
  query.set("width", Math.min(2000, Math.max(64, Math.round(chart.plot.clientWidth))));
  const answer = await fetch(`${url}?${query}`, { signal });
  if (!answer.ok) throw new Error((await answer.json()).detail);
  return answer.json();
}

// Bring a chart up to date; a newer question takes the place of one that is on its way.
async function draw(chart) {
  if (!chart.isSeen) return;
  chart.waiting?.abort();
  chart.waiting = new AbortController();
  try {
    const { signal } = chart.waiting;
    const answers = await Promise.all(chart.sources.map((one) => ask(one.url, chart, signal)));
    chart.traces = answers.flatMap((answer, i) => makeTraces(chart, answer, chart.sources[i]));
    await show(chart);
  } catch (error) {
    if (error.name !== "AbortError") complain(chart, error);
  }
}

function makeTraces(chart, answer, source) {
  const isOne = chart.sources.length === 1;
  return answer.curves.flatMap((curve, i) => {
    const ink = colour(`--c${(isOne ? i : source.ink) % 8}`);
    const name = isOne ? curve.metric.replace(/^[a-z]+\./, "") : source.name;
    const line = {
      type: "scatter", mode: curve.steps.length < 40 ? "lines+markers" : "lines", name,
      x: curve.steps, y: curve.values, line: { color: ink, width: 1.6 }, marker: { size: 4 },
      hovertemplate: `%{y:.6~g} <b>${escape(name)}</b><extra></extra>`,
    };
    const marks = Object.entries(curve.nonfinite).map(([word, steps]) => ({
      type: "scatter", mode: "markers", yaxis: "y2", x: steps, name: `${name}: ${WORDS[word]}`,
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
      if (low !== undefined) setRange(Math.floor(low), Math.ceil(high));
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

// Show these steps in all charts; null: from the beginning, or to the end.
function setRange(start, end) {
  if (start !== null && end !== null && end <= start) end = start + 1;
  if (start === shared.start && end === shared.end) return;
  Object.assign(shared, { start: start === null ? null : Math.max(0, start), end });
  const form = document.querySelector("form[data-range]");
  if (form) {
    form.elements.from.value = shared.start ?? "";
    form.elements.to.value = shared.end ?? "";
    form.querySelector("[data-whole]").hidden = shared.start === null && shared.end === null;
  }
  charts.forEach(draw);
}

function prepare(figure) {
  document.querySelector("[data-hint]")?.removeAttribute("hidden");
  const chart = {
    figure, plot: figure.querySelector(".plot"), metrics: JSON.parse(figure.dataset.metrics),
    sources: JSON.parse(figure.dataset.sources), traces: [], isDrawn: false, isSeen: false,
    isLog: figure.dataset.log === "yes",
  };
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

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find((one) => one.figure === entry.target);
    if (!entry.isIntersecting || chart.isSeen) continue;
    chart.isSeen = true;
    draw(chart);
  }
}, { rootMargin: "300px" });
document.querySelectorAll("[data-chart]").forEach((figure) => seen.observe(prepare(figure).figure));
document.querySelector("form[data-range]")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const { from, to } = event.target.elements;
  if (event.submitter?.hasAttribute("data-whole")) setRange(null, null);
  else setRange(whole(from.value), whole(to.value));
});
document.addEventListener("runs-changed", () => charts.forEach(draw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));
