// What the engine holds now: KV, tiers, and requests.
import { h, show, empty, table } from "/ui/dom.js";
import { bytes, count, percent, short, time } from "/ui/format.js";

export function drawKv(element, app, last) {
  const pages = last.pages || 1;
  const free = Math.max(0, last.pages - last.used - last.cached - last.pinned);
  const parts = [
    ["held", "kv_load", last.used],
    ["cached", "cached", last.cached],
    ["pinned", "prepare", last.pinned],
    ["free", "free", free],
  ];
  const size = app.state.page_size || 0;
  show(
    element,
    h(
      "div",
      {
        class: "stack",
        role: "img",
        "aria-label": parts.map(([name, , number]) => `${name} ${percent(number, pages)}`).join(", "),
      },
      parts.map(([, kind, number]) =>
        h("i", { class: `back ${kind}`, style: { width: `${(number / pages) * 100}%` } }),
      ),
    ),
    h(
      "p",
      { class: "legend" },
      parts.map(([name, kind, number]) =>
        h("span", null, h("i", { class: `dot ${kind}` }), `${name} `, h("b", null, percent(number, pages))),
      ),
    ),
    h(
      "dl",
      { class: "facts" },
      fact("Room", `${count(last.pages * size)} tokens in ${count(last.pages)} pages of ${size}`),
      fact(
        "Found in the cache",
        last.prefix_queries
          ? `${percent(last.prefix_hits, last.prefix_queries)} of ${count(last.prefix_queries)} prompt tokens`
          : "nothing was looked up yet",
      ),
      fact("Preemptions", count(last.preemptions)),
      app.now.windows.map((one) =>
        fact(
          `Window ${count(one.window)}`,
          `${percent(one.used_pages, one.pages)} held, ${percent(one.cached_pages, one.pages)} cached`,
        ),
      ),
      Object.entries(app.now.tiers).map(([name, tier]) =>
        fact(
          `Tier ${name}`,
          `${bytes(tier.bytes)} in ${count(tier.pages)} pages, ${count(tier.hits)} prompt tokens found, ${count(tier.loaded)} pages loaded${tier.queued ? `, ${count(tier.queued)} wait to be stored` : ""}${tier.up && tier.writable ? "" : " (does not work now)"}`,
        ),
      ),
      Object.keys(app.now.tiers).length ? null : fact("Tiers below the pool", "none (--kv-disk, --kv-valkey)"),
    ),
  );
}

const fact = (name, value) => [h("dt", null, name), h("dd", null, value)];

export function drawRunning(element, app) {
  const { requests, more } = app.now;
  if (!requests.length) {
    show(
      element,
      empty(
        "Nothing runs.",
        "Ask something in the ",
        h("a", { href: "#/playground" }, "playground"),
        ", or through the API.",
      ),
    );
    return;
  }
  show(
    element,
    table(
      ["request", "phase", "for", "in", "out"],
      requests
        .slice(0, 12)
        .map((one) => [
          h("a", { href: `#/request/${encodeURIComponent(one.request)}`, title: one.request }, short(one.request, 18)),
          h("span", { class: `chip ${one.phase}` }, one.phase),
          time(one.seconds),
          count(one.prompt_tokens),
          `${count(one.output_tokens)} / ${count(one.max_tokens)}`,
        ]),
      2,
    ),
  );
  const rest = more + Math.max(0, requests.length - 12);
  if (rest) element.append(h("p", { class: "soft" }, `and ${count(rest)} more`));
}
