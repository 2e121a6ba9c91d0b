// The console's page. Every text of a client or guest is set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const TOKEN_KEY = "envd.token";
const MAX_QUEUE = 4; // groups of a pool's queue that are shown
const LOST_MS = 12000; // the daemon sends something at least every 5 s
const episodes = new Map(); // id -> facts
const tiles = new Map(); // id -> elements
const visible = new Set(); // ids of tiles on the screen
let pools = [];
let view = "";
let clockOffset = 0; // the daemon's clock less ours, in seconds
let fullId = "";
let lastMessage = 0;
let selectedId = "";
let recordings = []; // the list that was loaded last
let shownRecordings = [];
let records = false; // whether the daemon records episodes

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- calls -------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
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

// Returns whether there was one. The address bar and the history lose it.
function takeTokenFromFragment() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return false;
  sessionStorage.setItem(TOKEN_KEY, token);
  history.replaceState(null, "", location.pathname);
  return true;
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
      pools = [];
      view = data.view;
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
async function select() {
  if (!view || selecting) return;
  const shown = fullId ? [] : [...visible].filter((id) => episodes.has(id)).sort();
  const body = JSON.stringify({ tiles: shown, full: fullId });
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

// ---- the wall ----------------------------------------------------------------------------------------------

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const id = entry.target.dataset.id;
    if (entry.isIntersecting) visible.add(id); else visible.delete(id);
  }
}, { rootMargin: "80px" });

function matches(facts) {
  const text = $("filter-text").value.trim().toLowerCase();
  const wanted = { pool: $("filter-pool").value, run: $("filter-run").value, task: $("filter-task").value, state: $("filter-state").value };
  for (const [key, value] of Object.entries(wanted)) {
    if (value && (facts[key] || "no run") !== value) return false;
  }
  if (!text) return true;
  return [facts.id, facts.group, facts.task, facts.run, facts.pool, facts.action, facts.owner]
    .some((field) => field && field.toLowerCase().includes(text)); // recordings have no group and action
}

function options(id, label, values) {
  const select_ = $(id);
  const known = [...select_.options].slice(1).map((option) => option.value);
  const wanted = [...new Set([...values, ...(select_.value ? [select_.value] : [])])].sort();
  if (select_.options.length && known.join("\n") === wanted.join("\n")) return;
  const before = select_.value;
  select_.replaceChildren(new Option(label, ""), ...wanted.map((value) => new Option(value, value)));
  select_.value = before;
}

function shownEpisodes() {
  return [...episodes.values()].filter(matches)
    .sort((a, b) => a.created - b.created || (a.group < b.group ? -1 : a.group > b.group ? 1 : 0) || (a.id < b.id ? -1 : 1));
}

function render() {
  applyZoom();
  const all = [...episodes.values()];
  const isLive = $("recordings").hidden;
  const listed = isLive ? all : recordings;
  options("filter-pool", "All pools", (isLive ? pools : recordings).map((each) => each.name || each.pool));
  options("filter-run", "All runs", listed.map((facts) => facts.run || "no run"));
  options("filter-task", "All tasks", listed.map((facts) => facts.task));
  options("filter-state", "All states", ["active", "terminated", "truncated", "failed"]);
  const shown = shownEpisodes();
  const wall = $("wall");
  const ids = new Set(shown.map((facts) => facts.id));
  for (const [id, tile] of tiles) {
    if (!ids.has(id)) { observer.unobserve(tile.root); tile.root.remove(); tiles.delete(id); visible.delete(id); }
  }
  let at = wall.firstChild;
  for (const facts of shown) {
    const tile = tiles.get(facts.id) || newTile(facts.id);
    if (tile.facts !== facts) fillTile(tile, facts);
    if (tile.root === at) at = at.nextSibling; else wall.insertBefore(tile.root, at);
  }
  renderTotals(all, shown.length);
  const isFiltered = all.length > 0 && shown.length === 0;
  if (!isLive) { renderRecordings(); return; }
  $("empty").hidden = shown.length > 0;
  $("empty").textContent = isFiltered
    ? "No episode matches the filters."
    : "No episodes are open.\nThey appear here as soon as a client resets one.";
  if (fullId) renderFull();
}

function renderTotals(all, shownCount) {
  const count = (state) => all.filter((facts) => facts.state === state).length;
  const waiting = pools.reduce((sum, pool) => sum + pool.waiting, 0);
  const items = [[all.length === 1 ? "episode" : "episodes", shownCount === all.length ? all.length : `${shownCount} of ${all.length}`], ["active", count("active")]];
  const ended = count("terminated") + count("truncated");
  if (ended) items.push(["ended", ended]);
  if (count("failed")) items.push(["failed", count("failed"), "bad"]);
  if (waiting) items.push(["machines waited for", waiting]);
  $("totals").replaceChildren(...items.map(([label, value, className]) => {
    const span = element("span", className);
    span.append(element("b", "", value), ` ${label}`);
    return span;
  }));
}

function newTile(id) {
  const root = element("div", "tile");
  root.tabIndex = 0;
  root.dataset.id = id;
  root.setAttribute("role", "listitem");
  const shot = element("div", "shot");
  const image = element("img");
  image.alt = "";
  const pointer = element("i", "pointer");
  pointer.hidden = true;
  const badge = element("span", "badge");
  const problem = element("span", "problem");
  const progress = element("i", "progress");
  shot.append(image, pointer, badge, problem, progress);
  const text = element("div", "text");
  const first = element("div", "line"), second = element("div", "line"), third = element("div", "line");
  const task = element("span", "task"), step = element("span", "step dim");
  const action = element("span", "action");
  const run = element("span", "run"), pool = element("span", "dim"), lease = element("span", "lease");
  first.append(task, step);
  second.append(action);
  third.append(run, pool, lease);
  text.append(first, second, third);
  root.append(shot, text);
  root.addEventListener("click", () => openFull(id));
  root.addEventListener("focus", () => { selectedId = id; });
  const tile = { root, image, pointer, badge, problem, progress, task, step, action, run, pool, lease };
  tiles.set(id, tile);
  observer.observe(root);
  return tile;
}

function fillTile(tile, facts) {
  tile.facts = facts;
  const ended = facts.state !== "active";
  tile.root.className = `tile${facts.in_call ? " busy" : ""}${facts.state === "failed" ? " failed" : ended ? " ended" : ""}`;
  tile.root.title = `${facts.id}\n${facts.task}\npool ${facts.pool}${facts.run ? `, run ${facts.run}` : ""}`;
  tile.root.setAttribute("aria-label", `${facts.task}, step ${facts.step} of ${facts.max_steps}, ${facts.state}`);
  tile.task.textContent = facts.task;
  tile.step.textContent = `${facts.step}/${facts.max_steps}`;
  tile.action.textContent = facts.action || "—";
  tile.action.classList.toggle("dim", !facts.action);
  tile.run.textContent = facts.run;
  tile.run.hidden = !facts.run;
  tile.pool.textContent = facts.pool;
  tile.progress.style.width = `${Math.min(100, (100 * facts.step) / facts.max_steps)}%`;
  const [label, className] = badgeOf(facts);
  tile.badge.textContent = label;
  tile.badge.className = `badge ${className}`;
  fillLease(tile);
}

function badgeOf(facts) {
  if (facts.score !== null) return [facts.score.toFixed(2), facts.score >= 0.999 ? "good" : facts.score > 0 ? "part" : "bad"];
  if (facts.state === "active") return ["", "active"];
  return [facts.reason.toLowerCase().replaceAll("_", " "), facts.state === "failed" ? "bad" : ""];
}

function leaseText(facts) {
  if (facts.in_call) return "in call";
  const left = Math.max(0, Math.round(facts.expires - Date.now() / 1000 - clockOffset));
  return left >= 60 ? `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")}` : `${left} s`;
}

function fillLease(tile) {
  const text = leaseText(tile.facts);
  if (tile.lease.textContent !== text) tile.lease.textContent = text;
  const left = tile.facts.expires - Date.now() / 1000 - clockOffset;
  tile.lease.classList.toggle("short", !tile.facts.in_call && left < 30);
  tile.lease.title = `Lease of ${Math.round(tile.facts.lease_s)} s`;
}

setInterval(() => {
  for (const id of visible) { const tile = tiles.get(id); if (tile && tile.facts) fillLease(tile); }
  fillAges();
  const facts = episodes.get(fullId);
  const lease = document.getElementById("fact-lease");
  if (facts && lease) lease.textContent = leaseText(facts);
}, 1000);

function showPicture(data) {
  const target = data.size === "full"
    ? (data.id === fullId ? { image: $("full-image"), pointer: $("full-pointer"), problem: $("full-note") } : null)
    : tiles.get(data.id);
  if (!target) return;
  if (data.jpeg) target.image.src = `data:image/jpeg;base64,${data.jpeg}`;
  target.problem.textContent = data.problem;
  placePointer(target.pointer, data.pointer, data.screen);
}

function placePointer(mark, at, screen) {
  mark.hidden = !at;
  if (!at) return;
  mark.style.left = `${(100 * (at[0] + 0.5)) / screen[0]}%`;
  mark.style.top = `${(100 * (at[1] + 0.5)) / screen[1]}%`;
}

function renderPools() {
  $("pools").replaceChildren(...pools.map((pool) => {
    const card = element("div", `pool${!pool.healthy ? " sick" : pool.waiting ? " waiting" : ""}`);
    card.dataset.pool = pool.name;
    const head = element("div", "pool-head");
    head.append(element("b", "", pool.name), element("span", "", `${pool.image} · ${pool.accelerator}`),
      element("span", "count", `${pool.leased}/${pool.capacity}`));
    const bar = element("div", "bar");
    for (const state of ["leased", "reserved", "idle", "starting", "dying"]) {
      const part = element("i", state);
      part.style.width = `${(100 * pool[state]) / pool.capacity}%`;
      if (pool[state]) bar.append(part);
    }
    const numbers = ["leased", "reserved", "idle", "starting", "dying"].filter((state) => pool[state] || state === "leased" || state === "idle")
      .map((state) => `${pool[state]} ${state}`);
    if (pool.waiting) numbers.push(`${pool.waiting} waited for`);
    const holders = Object.entries(pool.held_by_run).sort((a, b) => b[1] - a[1]).map(([run, count]) => `${run || "no run"} ${count}`);
    if (holders.length) numbers.push(`held by ${holders.slice(0, 6).join(", ")}${holders.length > 6 ? ", …" : ""}`);
    card.append(head, bar, element("div", "numbers", numbers.join(" · ")));
    if (pool.problem) card.append(element("div", "why", pool.problem));
    for (const group of pool.queue.slice(0, MAX_QUEUE)) {
      const line = element("div", "why");
      const age = element("b", "age");
      age.dataset.since = group.since;
      line.append(age, ` ${group.run || "no run"}, ${group.machines} machine${group.machines > 1 ? "s" : ""}: ${group.why}`);
      card.append(line);
    }
    if (pool.queue.length > MAX_QUEUE) card.append(element("div", "numbers", `and ${pool.queue.length - MAX_QUEUE} more groups`));
    return card;
  }));
  fillAges();
}

function fillAges() {
  for (const age of document.querySelectorAll(".age")) {
    age.textContent = `${Math.max(0, Math.round(Date.now() / 1000 + clockOffset - age.dataset.since))} s`;
  }
}

// ---- the full view -----------------------------------------------------------------------------------------

let detail = null;
let fetching = false;

function openFull(id) {
  fullId = selectedId = id;
  detail = null;
  $("full-image").removeAttribute("src");
  const tile = tiles.get(id);
  if (tile && tile.image.src) $("full-image").src = tile.image.src; // until the sharp one arrives
  $("full-pointer").hidden = true;
  $("full-note").textContent = "";
  $("full-steps").replaceChildren();
  $("full").hidden = false;
  $("full-replay").hidden = !records;
  $("full-close").focus();
  renderFull();
  select();
}

function closeFull() {
  if (replay) { closeReplay(); return; }
  const id = fullId;
  fullId = "";
  $("full").hidden = true;
  const tile = tiles.get(id);
  if (tile) tile.root.focus();
  select();
}

function renderFull({ fetches = true } = {}) {
  const facts = episodes.get(fullId);
  if (!facts) {
    $("full-note").textContent = `The episode was closed. This is its last picture.${records ? " Press Replay to see its recording." : ""}`;
    return;
  }
  const isStale = !detail || detail.id !== fullId || detail.step !== facts.step || detail.state !== facts.state || detail.score !== facts.score;
  if (isStale && fetches) fetchDetail();
  $("full-id").textContent = facts.id;
  $("full-task").textContent = facts.task;
  const rows = [["state", facts.state + (facts.reason ? ` (${facts.reason.toLowerCase().replaceAll("_", " ")})` : "")],
    ["step", `${facts.step} of ${facts.max_steps}`], ["lease", leaseText(facts)], ["pool", facts.pool], ["run", facts.run || "—"]];
  if (facts.owner) rows.push(["owner", facts.owner]);
  const known = detail && detail.id === fullId ? detail : null;
  if (known) {
    $("full-instruction").textContent = known.instruction;
    rows.push(["machine", known.machine]);
    if (known.cause) rows.push(["cause", known.cause]);
  }
  rows.push(["opened", new Date(facts.created * 1000).toLocaleTimeString()]);
  if (facts.parent) rows.push(["forked from", facts.parent]);
  const list = $("full-facts");
  list.replaceChildren();
  for (const [name, value] of rows) {
    const item = element("dd", "", value);
    if (name === "lease") item.id = "fact-lease";
    list.append(element("dt", "", name), item);
  }
  const siblings = [...episodes.values()].filter((other) => other.group === facts.group);
  if (siblings.length > 1) {
    const cell = element("dd", "siblings");
    siblings.forEach((other, index) => {
      const button = element("button", "", other.score === null ? String(index + 1) : `${index + 1}: ${other.score.toFixed(2)}`);
      button.disabled = other.id === fullId;
      button.title = other.id;
      button.addEventListener("click", () => openFull(other.id));
      cell.append(button);
    });
    list.append(element("dt", "", "group"), cell);
  }
  if (known) { renderScore(known); renderSteps($("full-steps"), known.steps); }
}

function renderScore(known) {
  const box = $("full-score");
  box.hidden = known.score === null && !known.evaluator_error;
  if (box.hidden) return;
  const list = element("ul");
  for (const check of known.checks) list.append(element("li", "", `${check.score.toFixed(2)}  ${check.name}: ${check.evidence}`));
  const title = element("b", "", known.score === null ? "No score" : `Score ${known.score.toFixed(2)}`);
  box.replaceChildren(title, list);
  if (known.evaluator_error) box.append(element("p", "dim", known.evaluator_error));
}

function renderSteps(list, steps, onClick = null) {
  list.replaceChildren(...(onClick ? [...steps] : [...steps].reverse()).map((step) => {
    const item = element("li");
    if (onClick) {
      item.tabIndex = 0;
      item.dataset.index = step.index;
      item.addEventListener("click", () => onClick(step));
    }
    item.append(element("span", "n", step.index), element("span", "what", step.actions.join("\n")));
    const ms = element("span", step.settled ? "ms" : "ms moving", `${step.ms} ms`);
    if (!step.settled) ms.title = "The screen still moved when the step ended.";
    item.append(ms);
    return item;
  }));
  if (!steps.length) list.replaceChildren(element("li", "dim", "no steps yet"));
}

async function fetchDetail() {
  if (fetching) return;
  fetching = true;
  const id = fullId;
  try {
    const found = await (await call(`api/episodes/${encodeURIComponent(id)}`)).json();
    if (id === fullId) { detail = found; episodes.set(id, episodes.get(id) || found); }
  } catch (error) {
    if (id === fullId && error instanceof Refused && error.status === 404) detail = null;
  } finally {
    fetching = false;
  }
  // Newer facts fetch again when they arrive.
  if (fullId && detail && detail.id === fullId) renderFull({ fetches: false });
}

function step(by) {
  const shown = shownEpisodes();
  const at = shown.findIndex((facts) => facts.id === fullId);
  const next = shown[(at + by + shown.length) % shown.length];
  if (next) openFull(next.id);
}

$("full-close").addEventListener("click", closeFull);
$("full-previous").addEventListener("click", () => step(-1));
$("full-next").addEventListener("click", () => step(1));

// ---- recordings and replays --------------------------------------------------------------------------------

let replay = null; // {id, frames, steps, at, playing}
let shownUrl = "";

async function showRecordings(wanted) {
  $("tab-live").setAttribute("aria-pressed", String(!wanted));
  $("tab-recordings").setAttribute("aria-pressed", String(wanted));
  for (const id of ["wall", "pools"]) $(id).hidden = wanted;
  $("recordings").hidden = !wanted;
  if (!wanted) { $("empty").hidden = true; render(); return; }
  try {
    recordings = await (await call("api/recordings")).json();
    render();
  } catch (error) {
    $("empty").hidden = false;
    $("empty").textContent = `The recordings cannot be listed: ${error.message}`;
  }
}

function renderRecordings() {
  const list = recordings.filter(matches);
  $("empty").hidden = list.length > 0;
  $("empty").textContent = recordings.length
    ? "No recording matches the filters."
    : "No recordings yet.\nEach episode appears here once it is opened.";
  // Live episodes change all the time: new rows would lose the focus.
  if (shownRecordings.length === list.length && list.every((found, index) => found === shownRecordings[index])) return;
  shownRecordings = list;
  $("recording-rows").replaceChildren(...list.map((found) => {
    const row = element("tr");
    row.tabIndex = 0;
    row.dataset.id = found.id;
    const score = found.score === null ? "" : found.score.toFixed(2);
    const shade = found.score === null ? "" : found.score >= 0.999 ? " good" : found.score > 0 ? " part" : " bad";
    const state = found.state ? found.state + (found.reason ? ` (${found.reason.toLowerCase().replaceAll("_", " ")})` : "") : "running, or cut short";
    const cells = [["", new Date(found.time * 1000).toLocaleString()], ["", found.task], ["", found.run || "—"], ["", found.pool],
      ["num", found.steps === null ? "" : String(found.steps)], [`num${shade}`, score], ["", state],
      ["num", found.bytes < 1e6 ? `${Math.ceil(found.bytes / 1e3)} kB` : `${(found.bytes / 1e6).toFixed(1)} MB`], ["mono dim", found.id]];
    row.append(...cells.map(([className, text]) => element("td", className, text)));
    row.addEventListener("click", () => openReplay(found.id));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); openReplay(found.id); } });
    return row;
  }));
}

async function openReplay(id) {
  let found;
  try {
    found = await (await call(`api/recordings/${encodeURIComponent(id)}`)).json();
  } catch (error) {
    $("full-note").textContent = error.message;
    if ($("full").hidden) { $("empty").hidden = false; $("empty").textContent = error.message; }
    return;
  }
  fullId = "";
  select();
  replay = { ...found, at: 0, playing: false, loading: false };
  $("full").hidden = false;
  $("full").classList.add("replay");
  for (const each of ["full-replay", "full-previous", "full-next"]) $(each).hidden = true;
  $("player").hidden = false;
  $("full-note").textContent = found.frames.length ? "" : "The recording has no pictures.";
  $("full-pointer").hidden = true;
  $("full-image").removeAttribute("src");
  $("full-id").textContent = found.episode_id;
  $("full-task").textContent = found.task_id;
  $("full-instruction").textContent = found.instruction;
  const rows = [["state", found.state ? `${found.state} (${found.reason.toLowerCase().replaceAll("_", " ")})` : "running, or cut short"],
    ["pool", found.pool], ["run", found.run || "—"], ["opened", new Date(found.create_time * 1000).toLocaleString()]];
  if (found.parent_episode_id) rows.push(["forked from", found.parent_episode_id]);
  $("full-facts").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
  renderScore(found);
  renderSteps($("full-steps"), found.steps, (step) => { setPlaying(false); seek(frameAt(step.time)); });
  $("scrub").max = Math.max(0, found.frames.length - 1);
  $("marks").replaceChildren(...found.steps.map((step) => {
    const mark = element("i");
    mark.style.left = `${(100 * frameAt(step.time)) / Math.max(1, found.frames.length - 1)}%`;
    return mark;
  }));
  $("play").focus();
  seek(0);
}

function closeReplay() {
  setPlaying(false);
  const id = replay.episode_id;
  replay = null;
  $("full").hidden = true;
  $("full").classList.remove("replay");
  $("player").hidden = true;
  for (const each of ["full-previous", "full-next"]) $(each).hidden = false;
  for (const row of $("recording-rows").children) if (row.dataset.id === id) row.focus();
  select();
}

// Returns the newest frame at a time.
function frameAt(time) {
  let at = 0;
  while (at + 1 < replay.frames.length && replay.frames[at + 1][0] <= time) at += 1;
  return at;
}

async function seek(index) {
  if (!replay || !replay.frames.length) return;
  replay.at = Math.min(replay.frames.length - 1, Math.max(0, index));
  if (replay.loading) return; // the loading one continues with the newest position
  replay.loading = true;
  const current = replay;
  try {
    let shown = -1;
    while (replay === current && shown !== current.at) {
      shown = current.at;
      const response = await call(`api/recordings/${encodeURIComponent(current.episode_id)}/frames/${shown}`);
      const url = URL.createObjectURL(await response.blob());
      if (replay !== current) { URL.revokeObjectURL(url); return; }
      $("full-image").src = url;
      URL.revokeObjectURL(shownUrl);
      shownUrl = url;
      const [time, pointer] = current.frames[shown];
      placePointer($("full-pointer"), pointer, current.screen);
      $("full-note").textContent = "";
      $("scrub").value = shown;
      $("player-time").textContent = `${(time - current.frames[0][0]).toFixed(1)} s   ${shown + 1}/${current.frames.length}`;
      markStep(shown + 1 < current.frames.length ? current.frames[shown + 1][0] : Infinity);
    }
  } catch (error) {
    if (replay === current) { setPlaying(false); $("full-note").textContent = error.message; }
  } finally {
    current.loading = false;
  }
}

// Marks the last step that ended before a time: a screen settles, and its frame is recorded, before its step ends.
function markStep(time) {
  const last = replay.steps.filter((step) => step.time < time).length - 1;
  [...$("full-steps").children].forEach((item, index) => {
    const isNow = index === last;
    if (isNow && !item.classList.contains("now")) item.scrollIntoView({ block: "nearest" });
    item.classList.toggle("now", isNow);
  });
}

function setPlaying(wanted) {
  if (!replay) return;
  replay.playing = wanted;
  $("play").textContent = wanted ? "❚❚" : "▶";
  if (wanted) playOn(replay);
}

async function playOn(current) {
  if (current.at + 1 >= current.frames.length) await seek(0);
  while (replay === current && current.playing && current.at + 1 < current.frames.length) {
    const pause = current.frames[current.at + 1][0] - current.frames[current.at][0];
    // Agents think for long: pauses are cut.
    await new Promise((done) => setTimeout(done, (1000 * Math.min(1.5, Math.max(0.04, pause))) / Number($("player-speed").value)));
    if (replay === current && current.playing) await seek(current.at + 1);
  }
  if (replay === current) setPlaying(false);
}

$("tab-live").addEventListener("click", () => showRecordings(false));
$("tab-recordings").addEventListener("click", () => showRecordings(true));
$("full-replay").addEventListener("click", () => openReplay(fullId));
$("play").addEventListener("click", () => setPlaying(!replay.playing));
$("scrub").addEventListener("input", () => { setPlaying(false); seek(Number($("scrub").value)); });

// ---- keys and settings -------------------------------------------------------------------------------------

function moveSelection(key) {
  const shown = [...$("wall").children];
  if (!shown.length) return;
  const columns = Math.max(1, shown.filter((tile) => tile.offsetTop === shown[0].offsetTop).length);
  const at = shown.findIndex((tile) => tile.dataset.id === selectedId);
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
  const next = at < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, at + by));
  shown[next].focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !$("login").hidden) return;
  const isTyping = event.target instanceof HTMLInputElement && event.target.type !== "range";
  if (event.key === "Escape") {
    if (!$("help").hidden) $("help").hidden = true;
    else if (fullId || replay) closeFull();
    else { $("filter-text").value = ""; document.activeElement.blur(); render(); }
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
    seek(replay.at + (event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : 1));
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
  applyZoom();
}

// Until the user chooses a size, more episodes have smaller tiles.
function applyZoom() {
  const count = episodes.size;
  $("zoom").value = localStorage.getItem("envd.zoom") || (count <= 24 ? 230 : count <= 80 ? 180 : 130);
  document.documentElement.style.setProperty("--tile", `${$("zoom").value}px`);
  $("wall").classList.toggle("small", Number($("zoom").value) < 170);
}

$("zoom").addEventListener("input", zoom);
for (const id of ["filter-text", "filter-pool", "filter-run", "filter-task", "filter-state"]) $(id).addEventListener("input", render);

takeTokenFromFragment();
window.addEventListener("hashchange", () => { if (takeTokenFromFragment()) location.reload(); });
render();
follow();
