// A request's time as bars below each other, and its steps as they came.
import { h, s, card } from "/ui/dom.js";
import { count, percent, tick, time } from "/ui/format.js";
import { runs, ticks, waterfall } from "/ui/data.js";

const NAMES = {
  prepare: "checked, rendered, tokenized",
  queue: "waited to be admitted",
  kv_lookup: "waited for a tier's answer",
  kv_load: "KV loaded from a tier",
  prefill: "its prompt was computed",
  decode: "its tokens were computed",
  stall: "left out of steps",
  stream: "last token to last byte",
  other: "no phase claims it",
};

/** Bars one below the other on one axis of time. */
export function drawing(phases, whole, marks, one) {
  const extra = { prefill: prefillWords(one), stall: stallWords(one), stream: streamWords(one) };
  const place = (at) => ({ left: `${Math.min(100, (at / whole) * 100)}%` });
  return h(
    "div",
    { class: "waterfall" },
    h(
      "div",
      { class: "axis", "aria-hidden": "true" },
      ticks(0, whole, 4)
        .filter((at) => at < whole * 0.97)
        .map((at) => h("span", { style: place(at) }, tick(at))),
    ),
    h(
      "ol",
      null,
      waterfall(phases, whole).map((bar) =>
        h(
          "li",
          null,
          h("span", { class: "phase", title: NAMES[bar.name] }, bar.name),
          h(
            "span",
            { class: "track" },
            marks.map((mark) =>
              h("i", { class: `mark ${mark.kind}`, style: place(mark.at), title: `${mark.name} at ${time(mark.at)}` }),
            ),
            h("i", {
              class: `back bar ${bar.name}`,
              style: { left: `${bar.from * 100}%`, width: `${bar.share * 100}%` },
            }),
          ),
          h("span", { class: "took" }, time(bar.seconds)),
          h("span", { class: "share" }, percent(bar.seconds, whole)),
          extra[bar.name] ? h("small", { class: "soft" }, extra[bar.name]) : null,
        ),
      ),
    ),
    marks.length
      ? h(
          "p",
          { class: "legend" },
          marks.map((mark) =>
            h("span", null, h("i", { class: `mark ${mark.kind}` }), `${mark.name} `, h("b", null, time(mark.at))),
          ),
        )
      : null,
  );
}

function prefillWords(one) {
  if (one.prefill_steps === undefined) return null;
  return `${count(one.computed_tokens)} tokens computed in ${count(one.prefill_steps)} step${one.prefill_steps === 1 ? "" : "s"}, ${count(one.cached_tokens)} taken from the cache`;
}

function stallWords(one) {
  return (
    Object.entries(one.detail?.stalls ?? {})
      .map(([cause, [steps, seconds]]) => `${cause}: ${count(steps)} steps, ${time(seconds)}`)
      .join("; ") || null
  );
}

function streamWords(one) {
  return one.detail?.blocked ? `for ${time(one.detail.blocked)} the answer waited for its client to read` : null;
}

/** The steps of it that the server still knows, when they were. */
export function strip(steps, whole, gap) {
  if (!steps?.length) return null;
  const [width, height] = [1000, 46];
  const x = (at) => (Math.max(0, Math.min(whole, at)) / whole) * width;
  const found = runs(steps);
  const words = (run) =>
    `${run.kind}${run.cause && run.kind === "stall" ? ` (${run.cause})` : ""}: ${run.steps === 1 ? "a step" : `${run.steps} steps`}, ${count(run.tokens)} tokens, ${time(run.begin)} to ${time(run.end)} after it came`;
  return card(
    "Its steps, as they came",
    h(
      "div",
      { class: "strip" },
      s(
        "svg",
        {
          viewBox: `0 0 ${width} ${height}`,
          preserveAspectRatio: "none",
          role: "img",
          "aria-label": found.slice(0, 12).map(words).join("; "),
        },
        s("rect", { class: "ground", x: 0, y: 0, width, height }),
        found.map((run) =>
          s(
            "rect",
            {
              class: `fill ${run.kind}`,
              x: x(run.begin),
              y: 0,
              height,
              width: Math.max(1, x(run.end) - x(run.begin) - (run.kind === "prefill" ? 1 : 0)),
            },
            s("title", null, words(run)),
          ),
        ),
        gap
          ? s(
              "rect",
              { class: "gap", x: x(gap[1]), y: 0, height, width: Math.max(2, x(gap[1] + gap[0]) - x(gap[1])) },
              s("title", null, `the longest wait between two tokens: ${time(gap[0])}`),
            )
          : null,
      ),
    ),
    h(
      "p",
      { class: "legend" },
      [
        ["prefill", "prefill, a chunk each"],
        ["decode", "decode"],
        ["stall", "left out"],
      ].map(([kind, name]) => h("span", null, h("i", { class: `dot ${kind}` }), name)),
      gap ? h("span", null, h("i", { class: "dot gap" }), `longest wait between two tokens: ${time(gap[0])}`) : null,
    ),
  );
}
