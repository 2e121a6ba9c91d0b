// The console's page: what all views share, its address, its keys, and the stream of updates. `wall.js`, `episode.js`
// and `recordings.js` have the views. Every text of a client or guest is set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const TOKEN_KEY = "envd.token";
const LOST_MS = 12000; // the daemon sends something at least every 5 s
const episodes = new Map(); // id -> facts
const tiles = new Map(); // id -> elements
const visible = new Set(); // ids of tiles on the screen
let pools = [];
let runs = [];
let view = "";
let clockOffset = 0; // the daemon's clock less ours, in seconds
let fullId = "";
let lastMessage = 0;
let selectedId = "";
let records = false; // whether the daemon records episodes
// The episode and the recording of the address, until the stream has said what is open.
let wantedId = "", wantedRecording = "";

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function scoreShade(score) {
  return score >= 0.999 ? "good" : score > 0 ? "part" : "bad";
}

function words(reason) {
  return reason ? ` (${reason.toLowerCase().replaceAll("_", " ")})` : "";
}

// ---- calls -------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (options.json) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(() => { throw new Error("The daemon does not answer."); });
  if (!response.ok) throw new Refused(response.status, (await response.text()).trim() || `status ${response.status}`);
  return response;
}

function showLogin(problem) {
  $("login-problem").textContent = problem;
  $("login").hidden = false;
  $("login-token").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, $("login-token").value.trim());
  $("login-token").value = "";
  $("login").hidden = true;
  follow();
});

// ---- the address: what is shown, to paste into an issue or a chat ---------------------------------------------

const FILTERS = ["text", "pool", "run", "task", "state"];

function address() {
  const fields = new URLSearchParams();
  if (!isLive()) fields.set("tab", "recordings");
  for (const key of FILTERS) if ($(`filter-${key}`).value.trim()) fields.set(key, $(`filter-${key}`).value.trim());
  if (!isLive() && sorting !== "-time") fields.set("sort", sorting);
  if (replay || wantedRecording) fields.set("recording", replay ? replay.episode_id : wantedRecording);
  else if (fullId || wantedId) fields.set("episode", fullId || wantedId);
  return fields.size ? `#${fields}` : location.pathname;
}

// An episode or a recording that is opened gets an entry of its own in the browser's history.
function writeAddress({ isEntry = false } = {}) {
  const wanted = address();
  if (wanted === (location.hash || location.pathname)) return;
  if (isEntry) history.pushState(null, "", wanted); else history.replaceState(null, "", wanted);
}

function applyAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const token = fields.get("token");
  if (token !== null) {
    // The address bar and the history lose it.
    sessionStorage.setItem(TOKEN_KEY, token);
    fields.delete("token");
    history.replaceState(null, "", fields.size ? `#${fields}` : location.pathname);
  }
  for (const key of FILTERS) {
    const field = $(`filter-${key}`), value = fields.get(key) || "";
    if (value && field instanceof HTMLSelectElement && ![...field.options].some((option) => option.value === value)) {
      field.append(new Option(value, value));
    }
    field.value = value;
  }
  sorting = fields.get("sort") || "-time";
  wantedRecording = fields.get("recording") || "";
  wantedId = fields.get("episode") || "";
  if (replay && replay.episode_id !== wantedRecording) closeReplay();
  if (fullId && fullId !== wantedId) closeFull();
  showTab(fields.get("tab") === "recordings");
  openWanted();
  return token !== null;
}

// Opens the episode of the address; once it is closed, its recording.
function openWanted() {
  const id = wantedId, recording = wantedRecording;
  if (!view) return;
  wantedId = wantedRecording = "";
  if (recording && !replay) { openReplay(recording); return; }
  if (!id) return;
  if (episodes.has(id)) { if (id !== fullId) openFull(id); }
  else if (records) openReplay(id);
  else setNotice(`Episode ${id} is not open here: it was closed, or never opened. This daemon does not record.`);
}

function setNotice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// ---- the stream --------------------------------------------------------------------------------------------

async function follow() {
  for (;;) {
    let problem = "The daemon ended the connection.";
    const abort = new AbortController();
    const watchdog = setInterval(() => { if (Date.now() - lastMessage > LOST_MS) abort.abort(); }, 1000);
    try {
      lastMessage = Date.now();
      const response = await call("api/events", { signal: abort.signal });
      await readEvents(response.body);
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        setLink("lost");
        const had = sessionStorage.getItem(TOKEN_KEY);
        sessionStorage.removeItem(TOKEN_KEY);
        showLogin(!had ? "This daemon asks for a token." : error.status === 403 ? error.message : "The token is not valid.");
        return;
      }
      problem = error instanceof Refused ? error.message : "The daemon does not answer.";
    } finally {
      clearInterval(watchdog);
    }
    view = "";
    setLink("lost", `Connection lost: ${problem} What you see is old; trying again …`);
    await new Promise((done) => setTimeout(done, 2000));
  }
}

async function readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    lastMessage = Date.now();
    buffer += value;
    for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
      handle(buffer.slice(0, end));
      buffer = buffer.slice(end + 2);
    }
  }
}

function handle(message) {
  const [first, second] = message.split("\ndata: ", 2);
  const data = JSON.parse(second);
  switch (first.slice("event: ".length)) {
    case "hello":
      episodes.clear();
      pools = runs = [];
      newView = data.view;
      document.title = "envd console";
      $("link").title = `Connected to envd ${data.version}`;
      setLink("live");
      sentSelection = "";
      $("tabs").hidden = !data.records;
      records = data.records;
      break;
    case "state":
      clockOffset = data.now - Date.now() / 1000;
      for (const facts of data.episodes) episodes.set(facts.id, facts);
      for (const id of data.removed) episodes.delete(id);
      if (data.pools) { pools = data.pools; renderPools(); }
      if (data.runs) { runs = data.runs; renderRuns(); }
      if (!view) {
        view = newView;
        if (!isLive()) loadRecordings();
        openWanted();
      }
      render();
      break;
    case "picture":
      showPicture(data);
      break;
  }
}

function setLink(state, banner = "") {
  $("link").className = `link ${state}`;
  $("banner").textContent = banner;
  $("banner").hidden = !banner;
}

// Selects the pictures that the stream carries: those of the tiles on the screen.
let sentSelection = "";
let selecting = false;
let newView = ""; // the stream's, until its first state arrives
async function select() {
  if (!view || selecting) return;
  const shown = fullId ? [] : [...visible].filter((id) => episodes.has(id)).sort();
  const body = JSON.stringify({ tiles: shown, full: fullId, live: Boolean(control.id) });
  if (body === sentSelection) return;
  selecting = true;
  try {
    await call(`api/views/${encodeURIComponent(view)}`, { method: "POST", body });
    sentSelection = body;
  } catch (error) {
    sentSelection = "";
  } finally {
    selecting = false;
  }
}
setInterval(select, 150);

// ---- keys and settings -------------------------------------------------------------------------------------

// Left and right follow the order of tiles, up and down their places.
function moveSelection(key) {
  const shown = [...$("wall").querySelectorAll(".tile")];
  if (!shown.length) return;
  const at = shown.findIndex((tile) => tile.dataset.id === selectedId);
  if (at < 0) { shown[0].focus(); return; }
  const sign = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
  if (key === "ArrowLeft" || key === "ArrowRight") {
    shown[Math.min(shown.length - 1, Math.max(0, at + sign))].focus();
    return;
  }
  const from = shown[at].getBoundingClientRect();
  let best = null, least = Infinity;
  for (const tile of shown) {
    const box = tile.getBoundingClientRect();
    const down = sign * (box.top - from.top);
    if (down < from.height / 2) continue;
    const distance = 4 * down + Math.abs(box.left - from.left);
    if (distance < least) { least = distance; best = tile; }
  }
  if (best) best.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !$("login").hidden) return;
  const isTyping = event.target instanceof HTMLInputElement && event.target.type !== "range";
  if (event.key === "Escape") {
    if (!$("help").hidden) $("help").hidden = true;
    else if (fullId || replay) closeFull();
    else { $("filter-text").value = ""; document.activeElement.blur(); filter(); }
  } else if (isTyping || event.target instanceof HTMLSelectElement) {
    return;
  } else if (event.key === "/") {
    event.preventDefault();
    $("filter-text").focus();
  } else if (event.key === "?") {
    $("help").hidden = !$("help").hidden;
  } else if (event.key === "+" || event.key === "-") {
    $("zoom").value = Number($("zoom").value) + (event.key === "+" ? 30 : -30);
    zoom();
  } else if (replay && event.key === " " && !(event.target instanceof HTMLButtonElement)) {
    event.preventDefault();
    setPlaying(!replay.playing);
  } else if (replay && event.key.startsWith("Arrow")) {
    if (event.target.id === "scrub") return;
    event.preventDefault();
    setPlaying(false);
    seekFrame(replay.at + (event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : 1));
  } else if (fullId && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    step(event.key === "ArrowLeft" ? -1 : 1);
  } else if (event.key.startsWith("Arrow") && !fullId) {
    event.preventDefault();
    moveSelection(event.key);
  } else if (event.key === "Enter" && event.target.classList.contains("tile")) {
    event.preventDefault(); // the button that gets the focus would be pressed
    openFull(event.target.dataset.id);
  }
});

function zoom() {
  localStorage.setItem("envd.zoom", $("zoom").value);
  render();
}

// Until the user chooses a size, more episodes have smaller tiles.
function applyZoom() {
  const count = episodes.size;
  $("zoom").value = localStorage.getItem("envd.zoom") || (innerWidth < 600 ? 150 : count <= 24 ? 230 : count <= 80 ? 180 : 130);
  $("wall").classList.toggle("small", Number($("zoom").value) < 170);
}

$("zoom").addEventListener("input", zoom);
for (const key of FILTERS) $(`filter-${key}`).addEventListener("input", () => filter());

function filter() {
  setNotice("");
  writeAddress();
  if (isLive()) render(); else loadRecordings();
}
