// Shapes of requests as a map: tokens in to the right, tokens out upwards, by powers of two.
import { h, s, show, select, card, empty, table, SPANS } from "/ui/dom.js";
import { count, percent, time } from "/ui/format.js";
import { bin, binName, grid, query as asQuery } from "/ui/data.js";
import { get } from "/ui/server.js";

const CELL = 62;
const HIGH = 40;
const LEFT = 104;

export async function shapes(body, app, _rest, asked) {
  const wanted = { since: "0", workload: "", ...asked };
  const change = (name) => (value) => app.go(`#/shapes${asQuery({ ...wanted, [name]: value })}`);
  const since = wanted.since === "0" ? "" : wanted.since;
  const [map, usage] = await Promise.all([
    get(`shapes${asQuery({ since, workload: wanted.workload })}`),
    get(`usage${asQuery({ by: "workload", since })}`),
  ]);
  const names = usage.lines.map((line) => line.group.workload).filter(Boolean);
  if (wanted.workload && !names.includes(wanted.workload)) names.push(wanted.workload);
  const told = h(
    "p",
    { class: "told", role: "status" },
    "Choose a cell to see its requests; point at it for its numbers.",
  );
  show(
    body,
    h("h1", null, "Shapes"),
    h("p", { class: "soft" }, "How many requests had how many tokens in and out. Each cell is a list of requests."),
    h(
      "div",
      { class: "filters" },
      select("Time", SPANS, wanted.since, change("since")),
      select(
        "Workload",
        [["", "any workload"], ...names.map((name) => [name, name])],
        wanted.workload,
        change("workload"),
      ),
    ),
    map.cells.length
      ? h("section", { class: "card" }, drawing(map.cells, wanted, told), told)
      : empty("No requests yet.", "Every request that ends has its place on this map."),
    usage.lines.length
      ? card(
          "By workload",
          table(
            [
              "workload",
              "requests",
              "tokens in, mean",
              "cached",
              "tokens out, mean",
              "TTFT, mean",
              "E2E, mean",
              "at SLO",
            ],
            usage.lines.map((line) => [line.group.workload || "-", count(line.requests), ...means(line)]),
          ),
        )
      : null,
  );
}

function means(line) {
  const had = line.requests - line.refused;
  return [
    had ? count(line.prompt_tokens / had) : "-",
    percent(line.cached_tokens, line.prompt_tokens),
    had ? count(line.output_tokens / had) : "-",
    time(line.ttft),
    time(line.e2e),
    line.judged ? percent(line.met, line.judged) : "-",
  ];
}

function drawing(cells, wanted, told) {
  const { columns, rows, at } = grid(cells);
  const [width, height] = [LEFT + columns.length * CELL + 6, rows.length * HIGH + 44];
  const most = Math.max(...cells.map((cell) => cell.requests));
  const parts = [];
  rows.forEach((output, row) => {
    parts.push(s("text", { x: LEFT - 8, y: row * HIGH + HIGH / 2 + 4, "text-anchor": "end" }, binName(output)));
    columns.forEach((prompt, column) => {
      const cell = at.get(`${prompt},${output}`);
      const place = { x: LEFT + column * CELL + 1, y: row * HIGH + 1, width: CELL - 2, height: HIGH - 2, rx: 4 };
      parts.push(cell ? filled(cell, place, most, wanted, told) : s("rect", { class: "ground", ...place }));
    });
  });
  columns.forEach((prompt, column) =>
    parts.push(
      s(
        "text",
        { x: LEFT + column * CELL + CELL / 2, y: rows.length * HIGH + 16, "text-anchor": "middle" },
        binName(prompt),
      ),
    ),
  );
  parts.push(
    s(
      "text",
      { x: LEFT + (columns.length * CELL) / 2, y: height - 6, "text-anchor": "middle", class: "name" },
      "tokens in →",
    ),
  );
  parts.push(
    s(
      "text",
      {
        x: 12,
        y: (rows.length * HIGH) / 2,
        "text-anchor": "middle",
        class: "name",
        transform: `rotate(-90 12 ${(rows.length * HIGH) / 2})`,
      },
      "tokens out →",
    ),
  );
  const made = s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "map", role: "group", "aria-label": "Requests by tokens in and out" },
    parts,
  );
  made.style.maxWidth = `${width * 1.5}px`;
  made.style.minWidth = `${width * 0.72}px`;
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Map of shapes" }, made);
}

function filled(cell, place, most, wanted, told) {
  const strength = most > 1 ? Math.log(cell.requests + 1) / Math.log(most + 1) : 1;
  const words = `${count(cell.requests)} requests with ${binName(cell.prompt)} tokens in (${percent(cell.cached_tokens, cell.prompt_tokens)} cached) and ${binName(cell.output)} out: TTFT ${time(cell.ttft)}, E2E ${time(cell.e2e)} on average${cell.judged ? `, ${percent(cell.met, cell.judged)} met their SLO` : ""}`;
  const tell = () => {
    told.textContent = `${words}.`;
  };
  const link = `#/requests${asQuery({ prompt: bin(cell.prompt).join("."), output: bin(cell.output).join("."), workload: wanted.workload, since: wanted.since === "0" ? "" : wanted.since })}`;
  return s(
    "a",
    { href: link, "aria-label": words, onmouseenter: tell, onfocus: tell },
    s("rect", { class: "ground", ...place }),
    s("rect", { class: "fill heat", ...place, "fill-opacity": (0.15 + 0.85 * strength).toFixed(3) }),
    s(
      "text",
      {
        class: strength > 0.55 ? "on" : "over",
        x: place.x + place.width / 2,
        y: place.y + place.height / 2 + 4,
        "text-anchor": "middle",
      },
      count(cell.requests),
    ),
  );
}
