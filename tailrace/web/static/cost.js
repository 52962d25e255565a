// What requests cost: busy, and with idle time.
import { h, show, select, card, empty, table, tile, SPANS } from "/ui/dom.js";
import { count, dollars, percent, time } from "/ui/format.js";
import { query as asQuery } from "/ui/data.js";
import { get } from "/ui/server.js";

const BY = [
  ["workload", "workload"],
  ["model", "model"],
  ["endpoint", "endpoint"],
  ["key", "key"],
  ["tenant", "tenant"],
  ["adapter", "adapter"],
  ["day", "day"],
];
const PRICE = "tailrace-usd-per-hour";

export async function cost(body, app, _rest, asked) {
  const wanted = { since: "86400", by: "workload", ...asked };
  const change = (name) => (value) => app.go(`#/cost${asQuery({ ...wanted, [name]: value })}`);
  const typed = localStorage.getItem(PRICE) ?? "";
  const [{ bill }, { prices }] = await Promise.all([
    get(`cost${asQuery({ by: wanted.by, since: wanted.since === "0" ? "" : wanted.since, per_hour: typed })}`),
    get("prices"),
  ]);
  const field = h("input", {
    type: "number",
    min: "0",
    max: "999999",
    step: "any",
    inputmode: "decimal",
    value: typed,
    placeholder: "as served",
  });
  const use = (value) => {
    if (value) localStorage.setItem(PRICE, value);
    else localStorage.removeItem(PRICE);
    cost(body, app, _rest, asked).catch((error) => show(body, empty("That cannot be worked out.", error.message)));
  };
  const known = [
    ["", "a public price ..."],
    ...prices.map((one) => [
      String(one.usd_per_hour),
      `${one.device}: $${one.usd_per_hour} (${one.seller}, ${one.date})`,
    ]),
  ];
  show(
    body,
    h("h1", null, "Cost"),
    h(
      "form",
      {
        class: "filters",
        onsubmit: (event) => {
          event.preventDefault();
          use(field.value);
        },
      },
      select("Time", SPANS, wanted.since, change("since")),
      select("By", BY, wanted.by, change("by")),
      h("label", { class: "field" }, h("span", null, "$ an hour"), field),
      h("button", { type: "submit" }, "Use"),
      select("Or", known, "", (value) => value && use(value)),
    ),
    bill === null
      ? empty(
          "What an hour of this machine costs is not known.",
          "Type it above, or start the server with ",
          h("code", null, "--price FILE"),
          ".",
        )
      : bill.lines.length
        ? drawn(bill, wanted.by)
        : empty("No requests in that time.", h("a", { href: "#/cost?since=0" }, "All there is")),
  );
}

function drawn(bill, by) {
  const busy = bill.lines.reduce((sum, line) => sum + line.busy.usd, 0);
  const all = bill.lines.reduce((sum, line) => sum + line.amortised.usd, 0);
  const requests = bill.lines.reduce((sum, line) => sum + line.usage.requests, 0);
  return [
    h(
      "div",
      { class: "tiles" },
      tile(dollars(bill.usd_per_hour), "an hour", bill.source),
      tile(dollars(busy), "busy", `${time(bill.busy_seconds)} of the device`),
      tile(dollars(all), "amortised", `${time(bill.paid_seconds)} paid for`),
      tile(percent(bill.utilisation), "utilisation", "device time of time paid for"),
      tile(count(requests), "requests"),
    ),
    card(
      `By ${by}`,
      table(
        [
          by,
          "",
          "$",
          "$ a request",
          "$ a million in",
          "$ a million out",
          "$ a request at SLO",
          "$ a million out at SLO",
        ],
        bill.lines.flatMap((line) => [
          [h("b", null, line.group[by] || "-"), "busy", ...money(line.busy)],
          ["", "amortised", ...money(line.amortised)],
        ]),
        2,
      ),
      h(
        "p",
        { class: "soft" },
        "Busy: the device time that requests took, times the price. Amortised: what the servers cost for as long as they ran, idle or not, divided in the same proportion. At SLO: the same money over those requests that met theirs.",
      ),
    ),
  ];
}

const money = (rates) =>
  [
    rates.usd,
    rates.per_request,
    rates.per_million_input,
    rates.per_million_output,
    rates.per_good_request,
    rates.per_million_good_output,
  ].map(dollars);
