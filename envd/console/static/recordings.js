// Recordings and their replays. Loaded last: starts the page.
"use strict";

let replay = null; // {id, frames, steps, at, playing}
let shownUrl = "";
let recordings = []; // the pages that were loaded
let sorting = "-time"; // a column; with - in front descending
let loadCount = 0;
const MAX_PAUSE_S = 1.5;
const SHORT = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" };

function showTab(isRecordings) {
  $("tab-live").setAttribute("aria-pressed", String(!isRecordings));
  $("tab-recordings").setAttribute("aria-pressed", String(isRecordings));
  for (const id of ["wall", "pools"]) $(id).hidden = isRecordings;
  for (const id of ["recordings", "recording-foot"]) $(id).hidden = !isRecordings;
  $("filter-text").placeholder = isRecordings ? "Filter: id, task, run…  ( / )" : "Filter: id, task, action…  ( / )";
  renderRuns();
  if (isRecordings) loadRecordings(); else { $("empty").hidden = true; render(); }
}

// Loads the recordings that match the filters, from the first or after those that are shown.
async function loadRecordings({ isMore = false } = {}) {
  if (!view) return; // loaded once the stream has begun
  const load = ++loadCount;
  const query = new URLSearchParams({ sort: sorting, offset: isMore ? recordings.length : 0 });
  for (const key of FILTERS) if ($(`filter-${key}`).value) query.set(key, $(`filter-${key}`).value);
  try {
    const page = await (await call(`api/recordings?${query}`)).json();
    if (load !== loadCount || isLive()) return; // a newer one was asked for
    recordings = isMore ? [...recordings, ...page.recordings] : page.recordings;
    setChoices(page.choices);
    renderRecordings(page);
  } catch (error) {
    if (load !== loadCount || isLive()) return;
    $("empty").hidden = false;
    $("empty").textContent = `The recordings cannot be listed: ${error.message}`;
  }
}

function renderRecordings({ total, matching }) {
  $("empty").hidden = matching > 0;
  $("empty").textContent = total ? "No recording matches the filters." : "No recordings yet.\nEach episode appears here once it is opened.";
  $("recording-count").textContent = `${recordings.length} of ${matching} recordings${matching < total ? `, of ${total} in all` : ""}`;
  $("recording-more").hidden = recordings.length >= matching;
  for (const head of document.querySelectorAll("th[data-sort]")) {
    const isSorted = sorting.replace("-", "") === head.dataset.sort;
    head.setAttribute("aria-sort", !isSorted ? "none" : sorting.startsWith("-") ? "descending" : "ascending");
  }
  $("recording-rows").replaceChildren(...recordings.map((found) => {
    const row = element("tr");
    row.tabIndex = 0;
    row.dataset.id = found.id;
    const cells = [["", found.ended ? new Date(found.time * 1000).toLocaleString([], SHORT) : "—"], ["", found.task], ["", found.run || "—"], ["", found.pool],
      ["num", found.steps === null ? "" : String(found.steps)],
      found.score === null ? ["num", ""] : [`num ${scoreShade(found.score)}`, found.score.toFixed(2)], ["", endText(found)],
      ["num", found.bytes < 1e6 ? `${Math.ceil(found.bytes / 1e3)} kB` : `${(found.bytes / 1e6).toFixed(1)} MB`], ["mono dim", found.id]];
    row.append(...cells.map(([className, text]) => element("td", className, text)));
    row.addEventListener("click", () => openReplay(found.id));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); openReplay(found.id); } });
    return row;
  }));
}

// A recording without an end is of an open episode, or of a daemon that was killed.
function endText(found) {
  return found.state ? found.state + words(found.reason) : episodes.has(found.id || found.episode_id) ? "running" : "cut short";
}

for (const head of document.querySelectorAll("th[data-sort] button")) {
  head.addEventListener("click", () => {
    const key = head.parentElement.dataset.sort;
    const isNumber = ["time", "steps", "score", "bytes"].includes(key);
    sorting = sorting === key ? `-${key}` : sorting === `-${key}` ? key : isNumber ? `-${key}` : key;
    filter();
  });
}
$("recording-more").addEventListener("click", () => loadRecordings({ isMore: true }));

async function openReplay(id) {
  let found;
  try {
    found = await (await call(`api/recordings/${encodeURIComponent(id)}`)).json();
  } catch (error) {
    if ($("full").hidden) setNotice(error.message); else $("full-note").textContent = error.message;
    return;
  }
  setNotice("");
  fullId = "";
  select();
  replay = { ...found, at: 0, playing: false, loading: false, ...shownTimes(found) };
  $("full").hidden = false;
  $("full").classList.add("replay");
  for (const each of ["full-replay", "full-previous", "full-next"]) $(each).hidden = true;
  for (const each of ["player", "full-video"]) $(each).hidden = false;
  for (const each of ["full-group", "full-tree"]) $(each).hidden = true;
  $("full-note").textContent = found.frames.length ? "" : "The recording has no pictures.";
  $("full-pointer").hidden = true;
  $("full-image").removeAttribute("src");
  $("full-id").textContent = found.episode_id;
  $("full-task").textContent = found.task_id;
  $("full-instruction").textContent = found.instruction;
  const rows = [["state", endText(found)],
    ["pool", found.pool], ["run", found.run || "—"], ["opened", new Date(found.create_time * 1000).toLocaleString()]];
  $("full-facts").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
  if (found.parent_episode_id) $("full-facts").append(element("dt", "", "branched from"), parentLink(found.parent_episode_id));
  renderScore(found);
  renderSteps($("full-steps"), found.steps, { onClick: (step) => { setPlaying(false); seek(replay.stepTimes[found.steps.indexOf(step)]); } });
  $("scrub").max = replay.length;
  $("marks").replaceChildren(...replay.stepTimes.map((time) => {
    const mark = element("i");
    mark.style.left = `${(100 * time) / replay.length}%`;
    return mark;
  }));
  $("play").focus();
  writeAddress({ isEntry: true });
  seekFrame(0);
}

// Returns when each frame and each step is shown, in seconds since the start. Agents think for long: pauses are cut.
function shownTimes(found) {
  const times = [...found.frames.map(([time]) => time), ...found.steps.map((step) => step.time)].sort((a, b) => a - b);
  const shown = new Map();
  let at = 0, before = times[0];
  for (const time of times) { at += Math.min(MAX_PAUSE_S, time - before); before = time; shown.set(time, at); }
  return { frameTimes: found.frames.map(([time]) => shown.get(time)), stepTimes: found.steps.map((step) => shown.get(step.time)), length: Math.max(at, 0.001) };
}

function closeReplay() {
  setPlaying(false);
  const id = replay.episode_id;
  replay = null;
  $("full").hidden = true;
  $("full").classList.remove("replay");
  for (const each of ["player", "full-video"]) $(each).hidden = true;
  writeAddress();
  for (const each of ["full-previous", "full-next"]) $(each).hidden = false;
  for (const row of $("recording-rows").children) if (row.dataset.id === id) row.focus();
  select();
}

// Shows a frame, and marks the steps up to the next one: a screen settles, and its frame is recorded, before its step ends.
function seekFrame(index) {
  if (!replay || !replay.frames.length) return;
  const at = Math.min(replay.frames.length - 1, Math.max(0, index));
  $("scrub").value = replay.frameTimes[at];
  showFrame(at, at + 1 < replay.frames.length ? replay.frameTimes[at + 1] - 1e-6 : Infinity);
}

// Shows a moment, in seconds since the start: the newest frame, and the last step that had ended.
function seek(time) {
  const at = Math.max(0, replay.frameTimes.findLastIndex((frame) => frame <= time));
  $("scrub").value = time;
  if (replay.frames.length) showFrame(at, time);
}

async function showFrame(index, time) {
  replay.at = index;
  replay.marked = time;
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
      $("player-time").textContent = `${(time - current.frames[0][0]).toFixed(1)} s   ${shown + 1}/${current.frames.length}`;
      markStep();
    }
    if (replay === current) markStep();
  } catch (error) {
    if (replay === current) { setPlaying(false); $("full-note").textContent = error.message; }
  } finally {
    current.loading = false;
  }
}

function markStep() {
  const last = replay.stepTimes.findLastIndex((time) => time <= replay.marked);
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
  if (current.at + 1 >= current.frames.length) seekFrame(0);
  while (replay === current && current.playing && current.at + 1 < current.frames.length) {
    const pause = current.frameTimes[current.at + 1] - current.frameTimes[current.at];
    await new Promise((done) => setTimeout(done, (1000 * Math.max(0.04, pause)) / Number($("player-speed").value)));
    while (current.loading) await new Promise((done) => setTimeout(done, 20));
    if (replay === current && current.playing) seekFrame(current.at + 1);
  }
  if (replay === current) setPlaying(false);
}

async function downloadVideo() {
  const id = replay.episode_id, button = $("full-video");
  button.disabled = true;
  button.textContent = "Making the video …";
  try {
    const url = URL.createObjectURL(await (await call(`api/recordings/${encodeURIComponent(id)}/video`)).blob());
    const link = element("a");
    link.href = url;
    link.download = `${id}.mp4`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    $("full-note").textContent = error.message;
  } finally {
    button.disabled = false;
    button.textContent = "Video";
  }
}

$("tab-live").addEventListener("click", () => { showTab(false); writeAddress(); });
$("tab-recordings").addEventListener("click", () => { showTab(true); writeAddress(); });
$("full-replay").addEventListener("click", () => openReplay(fullId));
$("play").addEventListener("click", () => setPlaying(!replay.playing));
$("full-video").addEventListener("click", () => downloadVideo());
$("scrub").addEventListener("input", () => { setPlaying(false); seek(Number($("scrub").value)); });

// ---- start -------------------------------------------------------------------------------------------------

window.addEventListener("hashchange", () => { if (applyAddress()) location.reload(); });
applyAddress();
render();
follow();
