// Load now and over the last minutes, KV and tiers, what runs, and the day so far.
import { h, show, tile, card, empty } from "/ui/dom.js";
import { count, percent, rate, tick, time } from "/ui/format.js";
import { growth, mean, since } from "/ui/data.js";
import { bars, chart } from "/ui/chart.js";
import { drawKv, drawRunning } from "/ui/engine.js";
import { get } from "/ui/server.js";

const SECONDS = 300;
const POLL = 10000;
const DAY_EVERY = 6;

export async function overview(body, app) {
  const tiles = h("div", { class: "tiles", "aria-live": "off" });
  const past = h("div", null, h("p", { class: "soft" }, "Loading ..."));
  const parts = app.state.live ? livePart(app, tiles) : null;
  show(
    body,
    h("h1", null, app.state.live ? app.state.model : "Ledger"),
    h("p", { class: "soft" }, app.state.live ? about(app.state) : notLive(app.state)),
    parts && [tiles, parts.element],
    card("The last 24 hours", past),
  );
  let slo = null;
  let polls = 0;
  const draw = () => parts?.draw(slo);
  app.listeners.add(draw);
  draw();
  async function poll() {
    if (app.state.ledger === null) {
      show(
        past,
        empty(
          "No ledger is kept.",
          "Requests that have ended are not remembered: ",
          h("code", null, "--ledger off"),
          ".",
        ),
      );
      return;
    }
    if (parts) slo = (await get("usage?since=3600")).lines[0] ?? { judged: 0, met: 0 };
    if (polls % DAY_EVERY === 0) {
      const [day, hours] = await Promise.all([get("usage?since=86400"), get("usage?since=86400&by=hour")]);
      drawPast(past, day.lines[0], hours.lines);
      if (!day.lines.length) polls = -1; // the first request is shown soon
    }
    polls += 1;
    draw();
  }
  const told = (error) => show(past, empty("The ledger cannot be read now.", error.message));
  await poll().catch((error) => {
    if (!parts || error.status === 401) throw error;
    told(error);
  });
  const timer = setInterval(() => document.hidden || poll().catch(told), POLL);
  return () => clearInterval(timer);
}

const about = (state) =>
  [
    `${state.kernels} kernels on ${state.threads} threads`,
    `context ${count(state.max_context)}`,
    `at most ${state.max_running} requests in a step`,
    state.slo ? `SLO ${state.slo}` : "no SLO set (--slo)",
    `Tailrace ${state.version}`,
  ].join(" · ");

const notLive = (state) => [
  `Read from ${state.ledger}. Live load, steps and the playground are part of the dashboard of a running server: `,
  h("code", null, "tailrace serve --ui"),
  ".",
];

function livePart(app, tiles) {
  const charts = {
    tokens: chart("Tokens a second", rate),
    load: chart("Requests", count, 4),
    kv: chart(
      "KV pages",
      (value) => percent(value),
      1,
      (value) => `${Math.round(value * 100)} %`,
    ),
    itl: chart("ITL: time between tokens", time, 0, tick),
  };
  const kv = h("div");
  const running = h("div");
  const element = [
    h(
      "div",
      { class: "charts" },
      Object.values(charts).map((one) => one.element),
    ),
    h("div", { class: "two" }, card("KV and tiers", kv), card("In the engine now", running)),
  ];

  function draw(slo) {
    const samples = app.samples;
    const last = samples[samples.length - 1];
    if (!last || !app.now) {
      show(tiles, h("p", { class: "soft" }, "Waiting for the first second ..."));
      return;
    }
    const ten = since(samples, 10);
    const minute = since(samples, 60);
    const ttft = mean(minute, last, "ttft");
    const itl = mean(minute, last, "itl");
    const pages = last.pages || 1;
    show(
      tiles,
      tile(
        rate(growth(ten, last, "output_tokens")),
        "output tokens/s",
        `${rate(growth(ten, last, "prompt_tokens"))} of prompts/s`,
      ),
      tile(count(last.running), "running", `of at most ${app.state.max_running}`),
      tile(
        count(last.waiting),
        "waiting",
        app.now.state === "awake" ? `engine ${app.now.engine}` : app.now.state.replace("_", " "),
      ),
      tile(time(ttft), "TTFT", "mean of the last minute"),
      tile(time(itl), "ITL", "mean of the last minute"),
      tile(percent(last.used, pages), "of KV held", `${percent(last.cached, pages)} cached`),
      slo && slo.judged
        ? tile(percent(slo.met, slo.judged), "met their SLO", `${count(slo.judged)} judged in the last hour`)
        : tile(
            "-",
            "met their SLO",
            slo ? (app.state.slo ? "none judged in the last hour" : "no SLO set (--slo)") : "",
          ),
    );
    const line = (name, kind, values, area = false) => ({ name, kind, area, values });
    const pairs = samples.slice(1).map((after, at) => [samples[at], after]);
    const rates = (field) => pairs.map(([before, after]) => [after.at, growth(before, after, field)]);
    const held = (field) => samples.map((sample) => [sample.at, sample[field]]);
    charts.tokens.draw(
      [line("output", "decode", rates("output_tokens"), true), line("prompts", "prefill", rates("prompt_tokens"))],
      last.at,
      SECONDS,
    );
    charts.load.draw(
      [line("running", "decode", held("running"), true), line("waiting", "queue", held("waiting"))],
      last.at,
      SECONDS,
    );
    charts.kv.draw(
      [
        line(
          "held and cached",
          "cached",
          samples.map((one) => [one.at, (one.used + one.cached + one.pinned) / (one.pages || 1)]),
          true,
        ),
        line(
          "held",
          "kv_load",
          samples.map((one) => [one.at, one.used / (one.pages || 1)]),
          true,
        ),
      ],
      last.at,
      SECONDS,
    );
    charts.itl.draw(
      [
        line(
          "mean of 5 s",
          "decode",
          every(samples, 5).map(([before, after]) => [after.at, mean(before, after, "itl")]),
        ),
      ],
      last.at,
      SECONDS,
    );
    drawKv(kv, app, last);
    drawRunning(running, app);
  }
  return { element, draw };
}

/** Pairs of samples so many seconds apart. */
function every(samples, seconds) {
  const made = [];
  let from = samples[0];
  for (const sample of samples) {
    if (sample.at - from.at >= seconds - 0.5) {
      made.push([from, sample]);
      from = sample;
    }
  }
  return made;
}

const dayTiles = (day) => [
  tile(count(day.requests), "requests", day.requests - day.ok ? `${count(day.requests - day.ok)} not ok` : "all ok"),
  tile(
    count(day.output_tokens),
    "tokens out",
    `${count(day.prompt_tokens)} in, ${percent(day.cached_tokens, day.prompt_tokens)} cached`,
  ),
  tile(time(day.ttft), "TTFT", "mean"),
  tile(time(day.e2e), "E2E", "mean"),
  tile(
    day.judged ? percent(day.met, day.judged) : "-",
    "met their SLO",
    day.judged ? `${count(day.judged)} judged` : "none judged",
  ),
  tile(time(day.device_seconds), "device time", ""),
];

function drawPast(element, day, hours) {
  if (!day) {
    show(
      element,
      empty(
        "No request has ended in that time.",
        "The first one that ends shows here within seconds. ",
        h("a", { href: "#/requests" }, "All requests"),
      ),
    );
    return;
  }
  const entries = byHour(hours);
  show(
    element,
    h("div", { class: "tiles small" }, dayTiles(day)),
    h(
      "div",
      { class: "wide", tabindex: "0", role: "region", "aria-label": "Requests by the hour" },
      bars("Requests by the hour", entries, count),
    ),
    h(
      "p",
      { class: "legend" },
      [
        ["ok", "decode"],
        ["failed", "stall"],
        ["refused", "queue"],
        ["left", "other"],
      ].map(([name, kind]) => h("span", null, h("i", { class: `dot ${kind}` }), name)),
    ),
  );
}

/** The last 24 hours, those without requests too. Hours of the ledger are UTC; names are the reader's. */
function byHour(lines) {
  const known = new Map(lines.map((line) => [Date.parse(`${line.group.hour.replace(" ", "T")}Z`), line]));
  const last = Math.floor(Date.now() / 3600000) * 3600000;
  return Array.from({ length: 24 }, (_, place) => {
    const at = last - (23 - place) * 3600000;
    const line = known.get(at) ?? { ok: 0, failed: 0, refused: 0, gone: 0, output_tokens: 0 };
    const name = `${String(new Date(at).getHours()).padStart(2, "0")}:00`;
    return {
      name,
      words: `${name}: ${count(line.ok)} ok, ${count(line.failed)} failed, ${count(line.refused)} refused, ${count(line.gone)} left; ${count(line.output_tokens)} tokens out`,
      parts: [
        ["decode", line.ok],
        ["stall", line.failed],
        ["queue", line.refused],
        ["other", line.gone],
      ],
    };
  });
}
