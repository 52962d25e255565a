// Charts over time as SVG. Colours are classes that the style has.
import { h, s, show } from "/ui/dom.js";
import { ticks } from "/ui/data.js";

const WIDTH = 320;
const WIDE = 840;
const HEIGHT = 140;
const LEFT = 46;
const BOTTOM = 20;
const TOP = 8;

/** A chart of the last so many seconds. `series`: [{name, kind, area, values: [[seconds, value or null], ...]}];
 * `draw` draws it anew. `most`: what the axis reaches at least; `words` shows a value, `axis` one on the axis. */
export function chart(title, words, most = 0, axis = words) {
  const body = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  const legend = h("p", { class: "legend" });
  const element = h("figure", { class: "chart" }, h("figcaption", null, title), body, legend);

  function draw(series, now, seconds) {
    const values = series.flatMap((one) => one.values.map(([, value]) => value ?? 0));
    const high = Math.max(most, ...values) * 1.08 || 1;
    const x = (at) => LEFT + Math.max(0, 1 - (now - at) / seconds) * (WIDTH - LEFT - 6);
    const y = (value) => HEIGHT - BOTTOM - (value / high) * (HEIGHT - BOTTOM - TOP);
    const parts = ticks(0, high, 3).map((tick) => [
      s("line", { class: "grid", x1: LEFT, x2: WIDTH - 6, y1: y(tick), y2: y(tick) }),
      s("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, axis(tick)),
    ]);
    for (const part of [0, 0.5, 1]) {
      const text = part === 1 ? "now" : `−${Math.round(((seconds * (1 - part)) / 60) * 10) / 10} min`;
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      parts.push(s("text", { x: LEFT + part * (WIDTH - LEFT - 6), y: HEIGHT - 4, "text-anchor": anchor }, text));
    }
    for (const one of series) {
      for (const run of pieces(one.values)) {
        const points = run.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
        if (one.area) {
          const [from, to] = [x(run[0][0]), x(run[run.length - 1][0])];
          parts.push(s("polygon", { class: `area ${one.kind}`, points: `${from},${y(0)} ${points} ${to},${y(0)}` }));
        }
        parts.push(
          run.length > 1
            ? s("polyline", { class: `line ${one.kind}`, points })
            : s("circle", { class: `dot ${one.kind}`, cx: x(run[0][0]), cy: y(run[0][1]), r: 2 }),
        );
      }
    }
    show(body, parts);
    show(
      legend,
      series.map((one) => {
        const last = one.values[one.values.length - 1]?.[1];
        return h("span", null, h("i", { class: `dot ${one.kind}` }), `${one.name} `, h("b", null, words(last ?? null)));
      }),
    );
  }
  return { element, draw };
}

/** Values without a gap, together. */
function pieces(values) {
  const made = [];
  let run = [];
  for (const value of values) {
    if (value[1] === null) {
      if (run.length) made.push(run);
      run = [];
    } else run.push(value);
  }
  if (run.length) made.push(run);
  return made;
}

/** Upright bars, each of parts: [{name, parts: [[kind, value]], words}]. */
export function bars(title, entries, words) {
  const high = Math.max(1, ...entries.map((entry) => entry.parts.reduce((sum, [, value]) => sum + value, 0))) * 1.05;
  const step = (WIDE - LEFT - 6) / entries.length;
  const y = (value) => HEIGHT - BOTTOM - (value / high) * (HEIGHT - BOTTOM - TOP);
  const every = Math.ceil(60 / step);
  const drawn = ticks(0, high, 3).map((tick) => [
    s("line", { class: "grid", x1: LEFT, x2: WIDE - 6, y1: y(tick), y2: y(tick) }),
    s("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, words(tick)),
  ]);
  entries.forEach((entry, place) => {
    let base = 0;
    const left = LEFT + place * step + step * 0.1;
    const bar = entry.parts.map(([kind, value]) => {
      const made = s("rect", {
        class: `fill ${kind}`,
        x: left,
        width: step * 0.8,
        y: y(base + value),
        height: Math.max(0, y(base) - y(base + value)),
      });
      base += value;
      return made;
    });
    drawn.push(s("g", null, s("title", null, entry.words), bar));
    if ((entries.length - 1 - place) % every === 0) {
      drawn.push(
        s(
          "text",
          {
            x: left + step * 0.4,
            y: HEIGHT - 4,
            "text-anchor": place === entries.length - 1 && entries.length > 1 ? "end" : "middle",
          },
          entry.name,
        ),
      );
    }
  });
  return s("svg", { viewBox: `0 0 ${WIDE} ${HEIGHT}`, class: "bars", role: "img", "aria-label": title }, drawn);
}
