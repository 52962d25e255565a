// The list of requests: those that run, and those of the ledger, a page at a time.
import { h, show, select, empty, SPANS } from "/ui/dom.js";
import { count, moment, percent, short, time } from "/ui/format.js";
import { bin, binName, query as asQuery, waterfall } from "/ui/data.js";
import { get } from "/ui/server.js";

const SIZE = 50;
const POLL = 3000;
const PHASES = ["prepare", "queue", "kv_lookup", "kv_load", "prefill", "decode", "stall", "stream", "other"];
const ORDERS = [
  ["latest", "latest first"],
  ["e2e", "slowest first (E2E)"],
  ["ttft", "longest TTFT first"],
  ["tpot", "longest TPOT first"],
];
const OUTCOMES = [
  ["", "any outcome"],
  ["ok", "ok"],
  ["failed", "failed"],
  ["refused", "refused"],
  ["gone", "left"],
];

export async function requests(body, app, _rest, asked) {
  const wanted = { order: "latest", since: "0", outcome: "", workload: "", ...asked };
  const change = (name) => (value) => app.go(`#/requests${asQuery(tidy({ ...wanted, [name]: value }))}`);
  const workloads =
    app.state.ledger === null ? [] : (await get("usage?by=workload")).lines.map((line) => line.group.workload);
  const named = [["", "any workload"], ...workloads.filter(Boolean).map((name) => [name, name])];
  const find = h("input", { type: "search", placeholder: "chatcmpl-… or x-request-id", maxlength: "256" });
  const running = h("div");
  const list = h("div", { class: "list" }, h("p", { class: "soft" }, "Loading ..."));
  const shaped = wanted.prompt || wanted.output;
  show(
    body,
    h("h1", null, "Requests"),
    h(
      "form",
      {
        class: "filters",
        onsubmit: (event) => {
          event.preventDefault();
          if (find.value.trim()) app.go(`#/request/${encodeURIComponent(find.value.trim())}`);
        },
      },
      select("Order", ORDERS, wanted.order, change("order")),
      select("Time", SPANS, wanted.since, change("since")),
      select("Outcome", OUTCOMES, wanted.outcome, change("outcome")),
      select("Workload", named, wanted.workload, change("workload")),
      h("label", { class: "field grow" }, h("span", null, "Find"), find),
    ),
    shaped &&
      h(
        "p",
        { class: "soft" },
        `Only shapes of ${shapeWords(wanted)}. `,
        h("a", { href: `#/requests${asQuery(tidy({ ...wanted, prompt: "", output: "" }))}` }, "All shapes"),
      ),
    running,
    list,
  );

  const drawRunning = () => app.state.live && app.now && show(running, runningList(app));
  app.listeners.add(drawRunning);
  drawRunning();
  if (app.state.ledger === null) {
    show(
      list,
      empty(
        "No ledger is kept.",
        "Requests that have ended are not remembered: ",
        h("code", null, "--ledger off"),
        ".",
      ),
    );
    return null;
  }
  const before = []; // what the pages before this one began behind
  let after = null;
  let total = 0;
  let ended = -1;

  async function load() {
    const { order, since, outcome, workload, prompt, output } = wanted;
    const page = await get(
      `requests${asQuery({ limit: SIZE, order, since: since === "0" ? "" : since, outcome, workload, prompt, output, after })}`,
    );
    total = page.total ?? total;
    const first = before.length * SIZE;
    const move = (name, possible, go) => h("button", { type: "button", disabled: !possible, onclick: go }, name);
    show(
      list,
      page.rows.length ? rows(page.rows) : nothing(wanted),
      page.rows.length
        ? h(
            "div",
            { class: "pager" },
            move("‹ Back", before.length, () => {
              after = before.pop();
              turn();
            }),
            h(
              "span",
              { class: "soft", role: "status" },
              `${count(first + 1)}-${count(first + page.rows.length)} of ${count(total)}`,
            ),
            move("Further ›", page.after, () => {
              before.push(after);
              after = page.after.join(".");
              turn();
            }),
          )
        : null,
    );
  }
  const turn = () =>
    load()
      .then(() => list.scrollIntoView({ block: "nearest" }))
      .catch((error) => show(list, empty("The list cannot be read now.", error.message)));
  await load();
  const timer = setInterval(() => {
    const last = app.samples[app.samples.length - 1];
    const now = last ? last.ended + last.failed : 0;
    if (document.hidden || !app.state.live || before.length || wanted.order !== "latest" || now === ended) return;
    ended = now;
    load().catch(() => {});
  }, POLL);
  return () => clearInterval(timer);
}

const tidy = (wanted) => ({
  ...wanted,
  order: wanted.order === "latest" ? "" : wanted.order,
  since: wanted.since === "0" ? "" : wanted.since,
});

function shapeWords({ prompt, output }) {
  const words = (text, name) => {
    const low = Number(text.split(".")[0]);
    const power = low ? Math.log2(low) + 1 : 0;
    return bin(power)[0] === low ? `${binName(power)} tokens ${name}` : `${text} tokens ${name}`;
  };
  return [prompt && words(prompt, "in"), output && words(output, "out")].filter(Boolean).join(", ");
}

function nothing(wanted) {
  const narrowed = wanted.outcome || wanted.workload || wanted.since !== "0" || wanted.prompt || wanted.output;
  return narrowed
    ? empty("No request is like that.", h("a", { href: "#/requests" }, "Show all"))
    : empty("No requests yet.", "What ends shows here within a second.");
}

function runningList(app) {
  const { requests: open, more } = app.now;
  if (!open.length) return null;
  return h(
    "section",
    { class: "card" },
    h("h2", null, `In the engine now: ${count(open.length + more)}`),
    h(
      "ul",
      { class: "rows" },
      open.slice(0, 10).map((one) =>
        h(
          "li",
          null,
          h(
            "a",
            { class: "row live", href: `#/request/${encodeURIComponent(one.request)}` },
            h("span", { class: "id", title: one.request }, short(one.request)),
            h("span", { class: "when" }, time(one.seconds)),
            h("span", { class: "tokens" }, `${count(one.prompt_tokens)} → ${count(one.output_tokens)}`),
            h("span", { class: "end" }, h("span", { class: `chip ${one.phase}` }, one.phase)),
            h(
              "span",
              { class: "bar" },
              h("i", {
                class: `back ${one.phase}`,
                style: { width: `${Math.max(1, (one.output_tokens / (one.max_tokens || 1)) * 100)}%` },
              }),
            ),
          ),
        ),
      ),
    ),
    open.length + more > 10 && h("p", { class: "soft" }, `and ${count(open.length + more - 10)} more`),
  );
}

function rows(found) {
  const longest = Math.max(1, ...found.map((one) => one.e2e_us));
  return [
    h(
      "div",
      { class: "row head", "aria-hidden": "true" },
      ["request", "ended", "tokens in → out", "TTFT", "E2E", "outcome", "where the time went"].map((name, at) =>
        h("span", { class: ["id", "when", "tokens", "ttft", "e2e", "end", "bar"][at] }, name),
      ),
    ),
    h(
      "ul",
      { class: "rows" },
      found.map((one) => h("li", null, row(one, longest))),
    ),
  ];
}

function row(one, longest) {
  const seconds = PHASES.map((name) => [name, one[`${name}_us`] / 1e6]).filter(([, value]) => value > 0);
  const words = seconds.map(([name, value]) => `${name} ${time(value)}`).join(", ");
  const parts = waterfall(seconds, longest / 1e6);
  const ended =
    one.outcome === "refused" ? `${one.requests > 1 ? `${count(one.requests)} × ` : ""}${one.status}` : one.outcome;
  return h(
    "a",
    { class: "row", href: one.request ? `#/request/${encodeURIComponent(one.request)}` : null },
    h(
      "span",
      { class: "id", title: one.request || one.http_request },
      short(one.request || one.http_request || "-"),
      h("small", null, [one.endpoint, one.workload, one.key].filter(Boolean).join(" · ")),
    ),
    h("span", { class: "when" }, moment(one.ended / 1e6)),
    h(
      "span",
      { class: "tokens", title: `${count(one.cached_tokens)} of them cached` },
      `${count(one.prompt_tokens)} → ${count(one.output_tokens)}`,
      one.cached_tokens ? h("small", null, `${percent(one.cached_tokens, one.prompt_tokens)} cached`) : null,
    ),
    h("span", { class: "ttft" }, one.ttft_us === null ? "-" : time(one.ttft_us / 1e6)),
    h("span", { class: "e2e" }, time(one.e2e_us / 1e6)),
    h(
      "span",
      { class: "end" },
      h("span", { class: `chip ${one.outcome}`, title: one.code || one.finish }, ended),
      one.slo_met === null
        ? null
        : h(
            "span",
            {
              class: one.slo_met ? "chip ok" : "chip failed",
              title: one.slo_met ? "It met its SLO" : "It missed its SLO",
            },
            one.slo_met ? "SLO ✓" : "SLO ✗",
          ),
    ),
    h(
      "span",
      { class: "bar", role: "img", "aria-label": words, title: words },
      parts.map((part) => h("i", { class: `back ${part.name}`, style: { width: `${part.share * 100}%` } })),
    ),
  );
}
