// Control of an episode by the person at the page: pointer, keyboard and clipboard become actions of an agent.
// Uses `$`, `element`, `call`, `Refused` and the full view of console.js.
"use strict";

const RENEW_MS = 10000; // a third of the lease
const DRAG_PX = 5; // a press that moves farther is a drag
const MOVE_MS = 40;
const MAX_TEXT = 2000; // characters of one action; a longer text is sent in parts
const MAX_ACTIONS = 100; // of one request
// Names of keys by `KeyboardEvent.key`. Keys that type text are sent as text.
const KEYS = {
  Enter: "enter", Tab: "tab", Backspace: "backspace", Delete: "delete", Escape: "esc", Insert: "insert", Home: "home", End: "end",
  PageUp: "pageup", PageDown: "pagedown", ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down",
  PrintScreen: "printscreen", ContextMenu: "menu", " ": "space",
};
const MODIFIERS = { Control: "ctrl", Shift: "shift", Alt: "alt", Meta: "super" };

const control = { id: "", episode: "", timer: 0, queue: [], sending: false, press: null, lastMove: 0, modifierAlone: "" };

async function post(path, body = {}) {
  const options = { method: "POST", body: JSON.stringify({ control: control.id, ...body }), json: true };
  return (await call(path, options)).json();
}

function path(route) { return `api/episodes/${encodeURIComponent(control.episode)}/${route}`; }

function showControl(note = "") {
  const has = Boolean(control.id);
  $("full").classList.toggle("controlled", has);
  $("control-take").hidden = has;
  $("control-release").hidden = !has;
  $("control-note").textContent = note || (has ? "You control this episode. The agent waits." : "");
  if (has) $("control-input").focus();
}

async function takeControl() {
  control.episode = fullId;
  control.id = crypto.randomUUID();
  try {
    await post(path("control"));
  } catch (error) {
    control.id = "";
    showControl(error.message);
    return;
  }
  control.timer = setInterval(renewControl, RENEW_MS);
  showControl();
}

async function renewControl() {
  try {
    await post(path("control"));
  } catch (error) {
    loseControl(`Control has ended: ${error.message}`);
  }
}

function loseControl(note = "") {
  clearInterval(control.timer);
  Object.assign(control, { id: "", queue: [], press: null, modifierAlone: "" });
  showControl(note);
}

async function releaseControl() {
  if (!control.id) return;
  await drained();
  try {
    await post(path("release"));
    loseControl("Handed back.");
  } catch (error) {
    loseControl(`Handing back failed: ${error.message} Control ends by itself within 30 s.`);
  }
}

// Sends actions in order, one request at a time; what arrives meanwhile goes with the next one.
async function act(...actions) {
  if (!control.id) return;
  control.queue.push(...actions);
  if (control.sending) return;
  control.sending = true;
  try {
    while (control.queue.length) {
      const { errors } = await post(path("actions"), { actions: control.queue.splice(0, MAX_ACTIONS) });
      const failed = errors.filter(Boolean);
      if (failed.length) showControl(failed.join(" "));
    }
  } catch (error) {
    loseControl(`Control has ended: ${error.message}`);
  } finally {
    control.sending = false;
  }
}

async function drained() {
  while (control.sending) await new Promise((done) => setTimeout(done, 20));
}

// ---- the pointer -------------------------------------------------------------------------------------------

// The place on the guest's screen, in its pixels.
function pointOf(event) {
  const box = $("full-image").getBoundingClientRect();
  const [width, height] = fullScreen;
  const x = Math.floor((event.clientX - box.left) / box.width * width), y = Math.floor((event.clientY - box.top) / box.height * height);
  return { x: Math.max(0, Math.min(width - 1, x)), y: Math.max(0, Math.min(height - 1, y)) };
}

const BUTTONS = ["left", "middle", "right"];

function modifiersOf(event) {
  return [event.ctrlKey && "ctrl", event.shiftKey && "shift", event.altKey && "alt"].filter(Boolean);
}

const screenBox = () => document.querySelector("#full .screen");

function onPointer(event) {
  if (!control.id) return;
  event.preventDefault();
  const at = pointOf(event);
  control.modifierAlone = "";
  if (event.type === "pointerdown") {
    screenBox().setPointerCapture(event.pointerId);
    control.press = { at, button: BUTTONS[event.button] || "left", dragging: false, modifiers: modifiersOf(event) };
    $("control-input").focus();
  } else if (event.type === "pointermove") {
    const press = control.press;
    if (press && !press.dragging && Math.hypot(at.x - press.at.x, at.y - press.at.y) >= DRAG_PX) {
      press.dragging = true;
      act({ action: "mouse_down", button: press.button, ...press.at });
    }
    if (event.timeStamp - control.lastMove < MOVE_MS || (press && !press.dragging)) return;
    control.lastMove = event.timeStamp;
    act({ action: "move", ...at });
  } else if (control.press) {
    const { button, dragging, modifiers, at: start } = control.press;
    control.press = null;
    if (dragging) act({ action: "mouse_up", button, ...at });
    else act({ action: "click", button, ...start, ...(modifiers.length ? { modifiers } : {}) });
  }
}

let wheel = 0;
function onWheel(event) {
  if (!control.id) return;
  event.preventDefault();
  wheel += event.deltaMode === 0 ? event.deltaY / 100 : event.deltaY / 3;
  const dy = Math.trunc(wheel);
  if (!dy) return;
  wheel -= dy;
  act({ action: "scroll", dy, ...pointOf(event) });
}

// ---- the keyboard ------------------------------------------------------------------------------------------

// A hidden field receives the keyboard, so that layouts, dead keys and input methods work: its text is typed.
function onKey(event) {
  if (!control.id || event.isComposing) return;
  event.stopPropagation();
  const held = modifiersOf(event).concat(event.metaKey ? ["super"] : []);
  if (event.type === "keyup") {
    if (control.modifierAlone && event.key === control.modifierAlone) act({ action: "press", keys: [MODIFIERS[event.key]] });
    control.modifierAlone = "";
    return;
  }
  if (event.key in MODIFIERS) { control.modifierAlone = event.key; return; }
  control.modifierAlone = "";
  const isText = event.key.length === 1;
  // AltGr types characters, and is Ctrl+Alt on some systems.
  const isChord = (event.ctrlKey || event.altKey || event.metaKey) && !event.getModifierState("AltGraph");
  if (isChord && event.key.toLowerCase() === "v" && event.ctrlKey) return; // pasted as text
  const name = KEYS[event.key] || (/^F\d+$/.test(event.key) ? event.key.toLowerCase() : "");
  if (isText && !isChord) return; // arrives as input
  if (!name && !(isText && isChord)) return;
  event.preventDefault();
  act({ action: "press", keys: [...held, name || event.key.toLowerCase()] });
}

function typeText(text) {
  const letters = [...text.replaceAll("\r\n", "\n")]; // whole characters of every plane
  for (let at = 0; at < letters.length; at += MAX_TEXT) act({ action: "type", text: letters.slice(at, at + MAX_TEXT).join("") });
}

function onInput(event) {
  if (event.isComposing) return;
  const text = $("control-input").value;
  $("control-input").value = "";
  if (text) typeText(text);
}

function onPaste(event) {
  event.preventDefault();
  typeText(event.clipboardData.getData("text/plain"));
}

// ---- an episode for a person -------------------------------------------------------------------------------

async function showStart() {
  const { tasks } = await (await call("api/tasks")).json();
  $("start-task").replaceChildren(...tasks.map((task) => new Option(`${task.id}: ${task.instruction.slice(0, 80)}`, task.id)));
  $("start-note").textContent = "";
  $("start").showModal();
}

// Opens an episode of a task or from a checkpoint, and takes control of it.
async function openForPerson(what, note) {
  note.textContent = "Opening …";
  try {
    await releaseControl();
    const { id } = await post("api/episodes", what);
    $("start").close();
    while (!episodes.has(id)) await new Promise((done) => setTimeout(done, 50));
    openFull(id);
    await takeControl();
    $("control-score").hidden = $("control-close").hidden = false;
  } catch (error) {
    note.textContent = error.message;
  }
}

function start(event) {
  event.preventDefault();
  openForPerson({ task: $("start-task").value }, $("start-note"));
}

async function score() {
  control.episode = fullId;
  await drained();
  try {
    const { score: value } = await post(path("evaluate"));
    loseControl(`Score ${value}`);
    $("control-score").hidden = true;
  } catch (error) {
    showControl(error.message);
  }
}

async function close_() {
  control.episode = fullId;
  await post(path("close"));
  loseControl("Closed.");
}

// Called whenever the full view shows another episode, or none.
function controlOf(facts) {
  if (control.id && (!facts || facts.id !== control.episode)) releaseControl();
  $("control").hidden = !facts || facts.state !== "active" && facts.run !== "console";
  const isOurs = Boolean(facts) && facts.run === "console";
  $("control-take").hidden = Boolean(control.id) || !facts || facts.state !== "active";
  $("control-score").hidden = !isOurs || facts.score !== null;
  $("control-close").hidden = !isOurs;
}

for (const [id, action] of [["control-take", takeControl], ["control-release", releaseControl], ["control-score", score],
  ["control-close", close_], ["start-open", showStart], ["start-cancel", () => $("start").close()]]) $(id).addEventListener("click", action);
$("start-form").addEventListener("submit", start);
for (const type of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) screenBox().addEventListener(type, onPointer);
screenBox().addEventListener("wheel", onWheel, { passive: false });
screenBox().addEventListener("contextmenu", (event) => { if (control.id) event.preventDefault(); });
screenBox().addEventListener("dragstart", (event) => event.preventDefault());
for (const type of ["keydown", "keyup"]) $("control-input").addEventListener(type, onKey);
$("control-input").addEventListener("input", onInput);
$("control-input").addEventListener("compositionend", () => setTimeout(() => onInput({ isComposing: false }), 0));
$("control-input").addEventListener("paste", onPaste);
window.addEventListener("pagehide", () => {
  if (control.id) call(path("release"), { method: "POST", json: true, keepalive: true, body: JSON.stringify({ control: control.id }) }).catch(() => {});
});
