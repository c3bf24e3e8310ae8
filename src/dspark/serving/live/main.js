// Joins the parts: the feed into the history, the history into pictures some times a second.

import { drawBlocks } from "./blocks.js";
import { drawFrontier, drawLoad, drawPool, drawReliability, drawTimes } from "./charts.js";
import { Chat } from "./chat.js";
import { format } from "./draw.js";
import { History } from "./history.js";

const PERIOD_MS = 250; // a step takes some milliseconds, an eye needs longer
const SLOW = 4; // periods between two pictures of averages: drawing takes time from a small machine
const STEPS = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

const at = (id) => document.getElementById(id);
const history = new History();
const chat = new Chat(history);
let isPaused = false;
let isChanged = false;
let numDrawn = 0;
let users = { users: 0, most: 0 };

function follow() {
  const feed = new EventSource("live/events");
  feed.addEventListener("message", ({ data }) => {
    const event = JSON.parse(data);
    if (event.type === "hello") {
      history.greet(event);
      const drafter = event.drafter ? `${event.drafter} drafter, block of ${event.block_size}` : "no drafter";
      at("model").textContent = `${event.model}, ${drafter}, policy ${event.policy}`;
      at("model").classList.remove("lost");
      load();
    } else if (event.type === "step") {
      history.add(event);
      isChanged = true;
    }
  });
  feed.addEventListener("error", () => {
    at("model").textContent = "The server does not answer; trying again.";
    at("model").classList.add("lost");
  });
}

async function load(wanted) {
  const options = wanted === undefined
    ? {}
    : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ users: wanted }) };
  const answer = await fetch("live/crowd", options).catch(() => null);
  if (answer?.ok) users = await answer.json();
  at("users").textContent = users.users === 1 ? "1 user" : `${users.users} users`;
  at("quieter").disabled = users.users === 0;
  at("busier").disabled = users.users >= users.most;
}

function change(direction) {
  const steps = STEPS.filter((size) => size < users.most).concat(users.most);
  const next = direction > 0
    ? steps.find((size) => size > users.users)
    : steps.findLast((size) => size < users.users);
  if (next !== undefined) load(next);
}

function draw() {
  if (!isChanged || isPaused || document.hidden) return;
  isChanged = false;
  const now = history.now();
  at("running").textContent = history.running;
  at("waiting").textContent = history.waiting;
  const figures = { offered: "offered", budget: "planned", tau: "tau", "per-user": "perUser", total: "total" };
  for (const [id, name] of Object.entries(figures)) at(id).textContent = format(now?.[name]);
  drawBlocks(at("blocks"), history, (id) => chat.isMine(id));
  drawPool(at("pool"), history);
  chat.colour();
  if (numDrawn++ % SLOW) return;
  drawLoad(at("load-chart"), history);
  drawFrontier(at("frontier"), history);
  drawReliability(at("reliability"), history);
  drawTimes(at("times"), history);
}

// One sentence now and then for who does not see the pictures.
function summarise() {
  const now = history.now();
  if (!now || isPaused || !history.running) return;
  at("summary").textContent =
    `${history.running} answers at once, ${format(now.planned)} guesses checked per answer, ` +
    `${format(now.perUser)} tokens a second for one user, ${format(now.total)} for all.`;
}

at("busier").addEventListener("click", () => change(1));
at("quieter").addEventListener("click", () => change(-1));
at("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  at("pause").setAttribute("aria-pressed", String(isPaused));
  at("pause").textContent = isPaused ? "Go on" : "Pause view";
});
addEventListener("pagehide", () => navigator.sendBeacon?.("live/crowd", new Blob(['{"users": 0}'], { type: "application/json" })));
setInterval(draw, PERIOD_MS);
setInterval(summarise, 8000);
follow();
