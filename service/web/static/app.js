// What makes the pages live: one stream of events for all tabs of a browser, none while they are
// hidden: a browser has six connections to a server, and a seventh stream would hang silently.
// Every page works without this file.

const LEAST_PAUSE_MS = 2000;
const lamp = document.querySelector(".live");
const others = new BroadcastChannel("runs");
let stream = null;
let release = null;
let waiting = null;
let timer = 0;
let refreshedAt = performance.now();

// Show the state as a word, not only as a colour.
function tell(isOn) {
  if (!lamp) return;
  lamp.classList.toggle("on", isOn);
  lamp.textContent = isOn ? "live" : "not live";
}

// Wait until this tab may hold the stream; in a browser without locks each tab has its own.
function connect() {
  if (waiting || stream || document.hidden) return;
  others.postMessage({ isAsked: true });
  if (!navigator.locks) return open();
  waiting = new AbortController();
  const hold = () => new Promise((resolve) => {
    release = resolve;
    open();
  });
  navigator.locks.request("runs-events", { signal: waiting.signal }, hold).catch(() => {});
}

function open() {
  stream = new EventSource("/api/v1/events");
  stream.onopen = () => pass({ isOn: true });
  stream.onerror = () => pass({ isOn: false });
  for (const kind of ["run", "job", "runs"]) {
    stream.addEventListener(kind, (event) => pass({ changed: JSON.parse(event.data).run ?? "" }));
  }
}

// Pass an event to this tab and to all others.
function pass(news) {
  others.postMessage(news);
  hear(news);
}

function hear(news) {
  if (news.isAsked && stream?.readyState === EventSource.OPEN) others.postMessage({ isOn: true });
  if ("isOn" in news) tell(news.isOn);
  // The page of one run ignores events of other runs.
  const own = document.body.dataset.run;
  if ("changed" in news && (!own || !news.changed || news.changed === own)) schedule();
}

function disconnect() {
  stream?.close();
  release?.();
  waiting?.abort();
  stream = release = waiting = null;
  tell(false);
}

function schedule() {
  if (timer || document.hidden) return;
  const pause = Math.max(0, LEAST_PAUSE_MS - (performance.now() - refreshedAt));
  timer = setTimeout(refresh, pause);
}

// Load this page again and replace its live parts.
async function refresh() {
  timer = 0;
  refreshedAt = performance.now();
  const parts = [...document.querySelectorAll("[data-live]")];
  if (parts.length) {
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      // A number that had one point has a curve now.
      if (parts.some((one) => "lone" in one.dataset && !page.getElementById(one.id))) location.reload();
      parts.forEach((part) => replace(part, page.getElementById(part.id)));
    } catch {
      return; // the service does not answer; the stream reconnects by itself
    }
  }
  document.dispatchEvent(new CustomEvent("runs-changed"));
  follow();
}

// Reload a part that waits for something that has no events.
function follow() {
  if (document.querySelector("[data-poll]")) setTimeout(schedule, LEAST_PAUSE_MS);
}

function replace(old, fresh) {
  if (!fresh || old.innerHTML === fresh.innerHTML || old.contains(document.activeElement)) return;
  const chosen = new Set([...old.querySelectorAll("input:checked")].map((one) => one.value));
  const open = new Set([...old.querySelectorAll("details[open]")].map((one) => one.id));
  const at = [...old.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const isAtEnd = (log) => log.scrollTop + log.clientHeight > log.scrollHeight - 40;
  const follows = [...old.querySelectorAll("pre.log")].map(isAtEnd);
  old.replaceChildren(...fresh.childNodes);
  old.querySelectorAll("input[type=checkbox]").forEach((one) => (one.checked = chosen.has(one.value)));
  old.querySelectorAll("details").forEach((one) => (one.open = open.has(one.id)));
  old.querySelectorAll(".scroll").forEach((one, i) => (one.scrollLeft = at[i] ?? 0));
  old.querySelectorAll("pre.log").forEach((log, i) => follows[i] && (log.scrollTop = log.scrollHeight));
  showChosen();
}

// Runs that are chosen for a comparison.
function showChosen() {
  const bar = document.querySelector("[data-chosen]");
  if (!bar) return;
  const boxes = [...document.querySelectorAll("input[name=run]")];
  const count = boxes.filter((box) => box.checked).length;
  boxes.forEach((box) => box.closest("tr").classList.toggle("chosen", box.checked));
  bar.hidden = count === 0;
  bar.querySelector("[data-count]").textContent = `${count} ${count === 1 ? "run" : "runs"} chosen`;
  bar.querySelector("[data-compare]").disabled = count < 2;
}

// The form of a submission: find a key, and see which ones are set.
function prepareForm(form) {
  const find = form.querySelector("[data-find]");
  const fields = [...form.querySelectorAll(".field[data-key]")];
  find?.addEventListener("input", () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    fields.forEach((field) => {
      const text = field.textContent.toLowerCase();
      field.hidden = !words.every((word) => text.includes(word));
    });
    form.querySelectorAll("details.group").forEach((group) => {
      const found = group.querySelectorAll(".field[data-key]:not([hidden])").length;
      group.hidden = words.length > 0 && !found;
      if (words.length && found) group.open = true;
    });
  });
  const mark = (field) => {
    const input = field.querySelector("input, select, textarea");
    field.classList.toggle("set", input.value !== "");
  };
  fields.forEach((field) => field.addEventListener("input", () => mark(field)));
}

others.onmessage = (message) => hear(message.data);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return disconnect();
  connect();
  schedule();
});
addEventListener("pagehide", disconnect);
addEventListener("pageshow", () => lamp && connect());
document.addEventListener("change", (event) => {
  if (event.target.name === "run") showChosen();
  if (event.target.matches("[data-submit-on-change]")) event.target.form.requestSubmit();
});
// Ask before an action that cannot be undone; without a script the button acts at once.
document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.ask;
  if (question && !confirm(question)) event.preventDefault();
});
document.querySelectorAll("form[data-fields]").forEach(prepareForm);
document.querySelectorAll("pre.log").forEach((log) => (log.scrollTop = log.scrollHeight));
showChosen();
if (lamp) connect();
follow();
if (document.querySelector("[data-chart]")) import(document.body.dataset.charts);
