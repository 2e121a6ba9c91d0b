// The full view of an open episode.
"use strict";

let detail = null;
let fetching = false;
let shownFacts = ""; // what the side panel was made of: made again, it would lose the focus and clicks

function openFull(id) {
  if (replay) closeReplay();
  setNotice("");
  fullId = selectedId = id;
  detail = null;
  shownFacts = "";
  $("full-image").removeAttribute("src");
  const tile = tiles.get(id);
  if (tile && tile.image.src) $("full-image").src = tile.image.src; // until the sharp one arrives
  $("full-pointer").hidden = true;
  $("full-note").textContent = "";
  $("full-steps").replaceChildren();
  $("full-checkpoint-note").textContent = "";
  $("full").hidden = false;
  $("full-replay").hidden = !records;
  $("full-close").focus();
  renderFull();
  writeAddress({ isEntry: true });
  select();
}

function closeFull() {
  if (replay) { closeReplay(); return; }
  const id = fullId;
  fullId = "";
  controlOf(null);
  $("full").hidden = true;
  writeAddress();
  const tile = tiles.get(id);
  if (tile) tile.root.focus();
  select();
}

function renderFull({ fetches = true } = {}) {
  const facts = episodes.get(fullId);
  controlOf(facts);
  if (!facts) {
    const state = $("full-facts").querySelector("dd");
    if (state) state.textContent = "closed";
    document.getElementById("fact-lease")?.replaceChildren("—");
    $("full-note").textContent = `The episode was closed. This is its last picture.${records ? " Press Replay to see its recording." : ""}`;
    return;
  }
  const isStale = !detail || detail.id !== fullId || detail.step !== facts.step || detail.action !== facts.action || detail.checkpoint !== facts.checkpoint || detail.state !== facts.state || detail.score !== facts.score;
  if (isStale && fetches) fetchDetail();
  const known = detail && detail.id === fullId ? detail : null;
  const members = [...episodes.values()].filter((other) => other.group === facts.group).sort(byLabel);
  const wanted = JSON.stringify([facts, known, members]);
  if (wanted === shownFacts) return;
  shownFacts = wanted;
  $("full-id").textContent = facts.id;
  $("full-task").textContent = facts.task;
  const rows = [["state", facts.state + words(facts.reason) + (facts.parked ? ", parked" : "")],
    ["step", `${facts.step} of ${facts.max_steps}`], ["lease", leaseText(facts)], ["pool", facts.pool], ["run", facts.run || "—"]];
  if (facts.owner) rows.push(["owner", facts.owner]);
  if (known) {
    $("full-instruction").textContent = known.instruction;
    rows.push(["machine", known.machine]);
    if (known.cause) rows.push(["cause", known.cause]);
  }
  rows.push(["opened", new Date(facts.created * 1000).toLocaleTimeString()]);
  const list = $("full-facts");
  list.replaceChildren();
  for (const [name, value] of rows) {
    const item = element("dd", "", value);
    if (name === "lease") item.id = "fact-lease";
    list.append(element("dt", "", name), item);
  }
  if (facts.parent) list.append(element("dt", "", "branched from"), parentLink(facts.parent, ` after step ${facts.first}`));
  renderTree(members);
  renderCheckpoints(known ? known.checkpoints : []);
  if (known) { renderScore(known); renderSteps($("full-steps"), known.steps, { first: facts.first }); }
}

// Leads to the parent of a branch: live, or its recording.
function parentLink(id, text = "") {
  const cell = element("dd");
  const button = element("button", "link-button", id);
  button.disabled = !episodes.has(id) && !records;
  if (button.disabled) button.title = "It was closed, and this daemon does not record.";
  button.addEventListener("click", () => { if (episodes.has(id)) openFull(id); else openReplay(id); });
  cell.append(button, text);
  return cell;
}

// Shows a group as a tree: its members, and below each the branches that were forked from it.
function renderTree(members) {
  const tree = $("full-tree");
  $("full-group").hidden = tree.hidden = members.length < 2;
  const focused = tree.contains(document.activeElement) ? document.activeElement.title : "";
  tree.replaceChildren(...members.map((other) => {
    const item = element("li");
    const button = element("button");
    const depth = other.label.split(".").length - 1;
    item.style.marginLeft = `${14 * depth}px`;
    button.append(element("b", "", `${depth ? "↳ " : ""}${other.label}`),
      element("span", "dim", depth ? `from step ${other.first}, at ${other.step}` : `step ${other.step}`));
    if (other.score !== null) button.append(element("span", scoreShade(other.score), other.score.toFixed(2)));
    else if (other.state !== "active") button.append(element("span", "dim", other.state));
    button.title = other.id;
    if (other.id === fullId) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => openFull(other.id));
    item.append(button);
    return item;
  }));
  if (focused) [...tree.querySelectorAll("button")].find((button) => button.title === focused)?.focus();
}

// Shows the tree of checkpoints: a person opens one in an episode of their own.
function renderCheckpoints(checkpoints) {
  const tree = $("full-checkpoints"), depths = new Map();
  $("full-states").hidden = tree.hidden = !checkpoints.length;
  const focused = tree.contains(document.activeElement) ? document.activeElement.title : "";
  tree.replaceChildren(...checkpoints.map((each) => {
    const item = element("li"), button = element("button");
    const depth = depths.has(each.parent) ? depths.get(each.parent) + 1 : 0;
    depths.set(each.id, depth);
    item.style.marginLeft = `${Math.min(14 * depth, 140)}px`;
    button.append(element("b", "", `${depth ? "↳ " : ""}step ${each.step}`), element("span", "dim", each.label),
      element("span", "", "drive from here"));
    button.title = `${each.id} of ${each.episode}`;
    if (each.id === detail.checkpoint) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => openForPerson({ checkpoint: each.id }, $("full-checkpoint-note")));
    item.append(button);
    return item;
  }));
  if (focused) [...tree.querySelectorAll("button")].find((button) => button.title === focused)?.focus();
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

// Shows steps: without `onClick` the newest first. Those before `first` are the parent's.
function renderSteps(list, steps, { onClick = null, first = 0 } = {}) {
  list.replaceChildren(...(onClick ? [...steps] : [...steps].reverse()).map((step) => {
    const item = element("li", step.index < first ? "inherited" : "");
    if (step.index < first) item.title = "A step of its parent, before the branch";
    if (onClick) {
      item.tabIndex = 0;
      item.dataset.index = step.index;
      item.addEventListener("click", () => onClick(step));
      item.addEventListener("keydown", (event) => { if (event.key === "Enter") onClick(step); });
    }
    item.append(element("span", "n", step.index), element("span", "what", (step.source === "human" ? "by a person:\n" : "") + [...step.actions, ...step.unrecorded ?? []].join("\n")));
    if (step.rolled_back) {
      item.classList.add("rolled-back");
      item.title = "A later rollback took this step back.";
    }
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

