// The engine's steps on an axis of time: a column a step, a lane a request.
import { h, show, select, card } from "/ui/dom.js";
import { count, short, time } from "/ui/format.js";
import { end, kindOf, latest, ticks } from "/ui/data.js";
import { get } from "/ui/server.js";

const POLL = 1000;
const KEPT = 512;
const LANE = 18;
const TOP = 34;
const WINDOWS = [
  ["3", "3 s"],
  ["10", "10 s"],
  ["30", "30 s"],
];
const MOST_LANES = 40;
const NAMED_FROM = 600;
const NAME = 78;

export async function steps(body, app) {
  const view = { steps: [], last: 0, seconds: 10, paused: false, chosen: null };
  const canvas = h("canvas", {
    tabindex: "0",
    role: "application",
    "aria-label": "Steps of the engine. Arrow keys choose one, Home and End the first and the last.",
    "aria-describedby": "step",
  });
  const box = h("div", { class: "canvas" }, canvas);
  const summary = h("p", { class: "soft" });
  const chosen = h("div", { id: "step", "aria-live": "polite" });
  const pause = h("button", { type: "button", onclick: () => hold(!view.paused) }, "Pause");
  show(
    body,
    h("h1", null, "Steps"),
    h(
      "p",
      { class: "soft" },
      "Who was in each step of the engine, and with what. Choose a step to see it; that pauses the picture.",
    ),
    h(
      "div",
      { class: "filters" },
      select("Window", WINDOWS, "10", (value) => {
        view.seconds = Number(value);
        draw();
      }),
      pause,
    ),
    h(
      "section",
      { class: "card" },
      summary,
      box,
      h(
        "p",
        { class: "legend" },
        [
          ["prefill", "prefill (prompt tokens)"],
          ["decode", "decode"],
          ["stall", "left out"],
        ].map(([kind, name]) => h("span", null, h("i", { class: `dot ${kind}` }), name)),
      ),
    ),
    card("The chosen step", chosen),
  );

  function hold(value) {
    view.paused = value;
    pause.textContent = value ? "Go on" : "Pause";
    if (!value) view.chosen = null;
    if (!value) load().catch(() => {});
    draw();
  }

  async function load() {
    const found = await get(`steps?after=${view.last}`);
    if (found.last < view.last) view.steps = [];
    view.last = found.last;
    view.steps.push(
      ...found.steps.map((step) => ({
        ...step,
        parts: step.parts.map((part) => ({ who: found.names[part[0]], part })),
      })),
    );
    view.steps.splice(0, view.steps.length - KEPT);
    draw();
  }

  let drawn = { shown: [], x: () => 0 };
  function draw() {
    drawn = paint(canvas, box, view, app.samples);
    const all = drawn.shown;
    const parts = all.reduce((sum, step) => sum + step.parts.filter((one) => !one.part[3]).length, 0);
    const busy = all.reduce((sum, step) => sum + step.seconds, 0);
    summary.textContent = all.length
      ? `${count(all.length)} steps in ${view.seconds} s: ${time(busy / all.length)} each on average, with ${(parts / all.length).toFixed(1)} requests in each.`
      : view.steps.length
        ? `No step in the last ${view.seconds} s: the engine is idle.`
        : "No step yet. Ask something, and its steps show here.";
    showChosen(chosen, view);
  }

  function choose(step) {
    if (!step) return;
    view.chosen = step;
    if (!view.paused) hold(true);
    view.chosen = step;
    draw();
  }

  canvas.addEventListener("click", (event) => {
    const at = event.clientX - canvas.getBoundingClientRect().left;
    choose(drawn.shown.find((step) => drawn.x(step.begin) <= at + 1 && at - 1 <= drawn.x(step.begin + step.seconds)));
  });
  canvas.addEventListener("keydown", (event) => {
    const all = drawn.shown;
    const place = all.indexOf(view.chosen);
    const next = {
      ArrowLeft: place < 0 ? all.length - 1 : Math.max(0, place - 1),
      ArrowRight: place < 0 ? all.length - 1 : Math.min(all.length - 1, place + 1),
      Home: 0,
      End: all.length - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(all[next]);
  });
  const resized = new ResizeObserver(draw);
  resized.observe(box);
  app.listeners.add(draw);
  await load();
  const timer = setInterval(() => view.paused || document.hidden || load().catch(() => {}), POLL);
  return () => {
    clearInterval(timer);
    resized.disconnect();
  };
}

/** Draws; gives the steps that are shown, and where a time is. */
function paint(canvas, box, view, samples) {
  const last = view.steps[view.steps.length - 1];
  const until = view.paused ? (view.until ?? end(last)) : latest(samples, last);
  view.until = view.paused ? until : null;
  const from = until - view.seconds;
  const shown = view.steps.filter((step) => step.begin + step.seconds > from && step.begin <= until);
  const lanes = [...new Set(shown.flatMap((step) => step.parts.map((one) => one.who)))];
  const width = box.clientWidth;
  const height = TOP + Math.max(3, Math.min(lanes.length, MOST_LANES)) * LANE + 4;
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const side = width >= NAMED_FROM ? NAME : 0;
  const x = (at) => side + Math.max(0, (at - from) / view.seconds) * (width - side);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = colour("soft");
  pen.strokeStyle = colour("grid");
  for (const tick of ticks(0, view.seconds, width < 500 ? 3 : 6)) {
    const at = x(until - tick);
    pen.beginPath();
    pen.moveTo(at, 14);
    pen.lineTo(at, height);
    pen.stroke();
    pen.textAlign = tick === 0 ? "right" : at < side + 30 ? "left" : "center";
    pen.fillText(tick === 0 ? "now" : `−${tick} s`, at, 10);
  }
  const most = Math.max(1, ...shown.flatMap((step) => step.parts.map((one) => one.part[1])));
  const row = new Map(lanes.map((who, place) => [who, place]));
  if (side) {
    pen.textAlign = "left";
    lanes
      .slice(0, MOST_LANES)
      .forEach((who, place) => pen.fillText(`…${who.slice(-8)}`, 0, TOP + place * LANE + LANE / 2 + 4));
  }
  for (const step of shown) {
    const left = x(step.begin);
    const wide = Math.max(1, x(step.begin + step.seconds) - left - ((step.seconds / view.seconds) * width > 3 ? 1 : 0));
    if (step === view.chosen) {
      pen.fillStyle = colour("focus");
      pen.fillRect(left - 1, 14, wide + 2, height - 14);
    }
    pen.fillStyle = colour("soft");
    pen.globalAlpha = 0.45;
    pen.fillRect(left, TOP - 12, wide, 8);
    pen.globalAlpha = 1;
    for (const { who, part } of step.parts) {
      const place = row.get(who);
      if (place >= MOST_LANES) continue;
      const kind = kindOf(part);
      pen.fillStyle = colour(kind);
      pen.globalAlpha = kind === "prefill" ? 0.45 + 0.55 * (part[1] / most) : 1;
      pen.fillRect(left, TOP + place * LANE + 2, wide, LANE - 4);
      pen.globalAlpha = 1;
    }
  }
  return { shown, x, lanes };
}

function showChosen(element, view) {
  const step = view.chosen;
  if (!step) {
    show(element, h("p", { class: "soft" }, "None is chosen."));
    return;
  }
  const prompt = step.parts.reduce((sum, one) => sum + one.part[1], 0);
  const taken = step.parts.filter((one) => !one.part[3]).length;
  show(
    element,
    h(
      "p",
      null,
      `It took ${time(step.seconds)}, with ${count(taken)} request${taken === 1 ? "" : "s"}${prompt ? ` and ${count(prompt)} tokens of prompts` : ""}.`,
    ),
    h(
      "ul",
      { class: "who" },
      step.parts.map(({ who, part }) =>
        h(
          "li",
          null,
          h("i", { class: `dot ${kindOf(part)}` }),
          h("a", { href: `#/request/${encodeURIComponent(who)}`, title: who }, short(who, 26)),
          " ",
          h(
            "span",
            { class: "soft" },
            part[3]
              ? `left out (${part[3]})`
              : [
                  part[1] && `${count(part[1])} of its prompt`,
                  part[2] && `${count(part[2])} token${part[2] === 1 ? "" : "s"} out`,
                ]
                  .filter(Boolean)
                  .join(", "),
          ),
        ),
      ),
    ),
  );
}
