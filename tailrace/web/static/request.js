// One request: its waterfall, the steps that are still known, and in words why it took what it took.
import { h, show, tile, card, empty, table } from "/ui/dom.js";
import { count, dollars, moment, short, time } from "/ui/format.js";
import { pieces } from "/ui/data.js";
import { drawing, strip } from "/ui/waterfall.js";
import { get, Refused } from "/ui/server.js";

const TRIES = 20;

export async function request(body, app, [name], _query) {
  if (!name) {
    show(body, empty("No request is named.", h("a", { href: "#/requests" }, "To the list")));
    return null;
  }
  let timer = null;
  let left = false;
  async function load(tries) {
    let found;
    try {
      found = await get(`requests/${encodeURIComponent(name)}`);
    } catch (error) {
      if (error instanceof Refused && error.status === 404) return said(body, name, error);
      throw error;
    }
    if (left) return;
    if (found.soon) {
      if (tries === TRIES) return said(body, name, new Error("It has ended, but the ledger does not have it."));
      show(body, h("p", { class: "soft", role: "status" }, "It has just ended; the ledger has it within a second ..."));
      timer = setTimeout(() => load(tries + 1).catch((error) => said(body, name, error)), 500);
      return;
    }
    show(
      body,
      h("p", null, h("a", { href: "#/requests" }, "‹ All requests")),
      found.running.map((one) => running(one)),
      found.ended.map((one) => ended(one)),
    );
    if (found.running.length) timer = setTimeout(() => load(0).catch((error) => said(body, name, error)), 1000);
  }
  await load(0);
  return () => {
    left = true;
    clearTimeout(timer);
  };
}

function said(body, name, error) {
  show(
    body,
    h("p", null, h("a", { href: "#/requests" }, "‹ All requests")),
    empty(`Nothing is known of ${short(name, 44)}.`, error.message),
  );
}

function running(one) {
  const phases = Object.entries(one.phases_ms).map(([name, ms]) => [name, ms / 1000]);
  return h(
    "article",
    null,
    h("h1", { class: "id" }, one.request),
    h("p", null, h("span", { class: `chip ${one.phase}` }, `running: ${one.phase}`)),
    h(
      "div",
      { class: "tiles" },
      tile(time(one.e2e_ms / 1000), "so far"),
      tile(one.ttft_ms === null ? "-" : time(one.ttft_ms / 1000), "TTFT"),
      tile(count(one.prompt_tokens), "tokens in", `${count(one.tokens.cached)} cached`),
      tile(count(one.tokens.output), "tokens out"),
    ),
    card("Where its time went until now", drawing(phases, one.e2e_ms / 1000, [], {})),
    strip(one.steps, one.e2e_ms / 1000),
  );
}

function ended(one) {
  const whole = one.e2e_us / 1e6;
  const marks = [];
  if (one.ttft_us !== null) marks.push({ at: one.ttft_us / 1e6, name: "first token", kind: "first" });
  const bound = one.detail.slo?.ttft?.[0];
  if (bound && bound < whole) marks.push({ at: bound, name: "TTFT bound", kind: "bound" });
  const gap = one.detail.gap;
  return h(
    "article",
    null,
    h("h1", { class: "id" }, one.request || one.http_request),
    h(
      "p",
      { class: "soft" },
      [
        one.endpoint,
        one.model,
        one.adapter && `adapter ${one.adapter}`,
        one.key && `key ${one.key}`,
        one.tenant && `tenant ${one.tenant}`,
        one.workload && `workload ${one.workload}`,
        `came ${moment(one.received / 1e6)}`,
        one.stream ? "streamed" : "whole",
      ]
        .filter(Boolean)
        .join(" · "),
    ),
    h(
      "p",
      null,
      h("span", { class: `chip ${one.outcome}` }, [one.outcome, one.finish || one.code].filter(Boolean).join(": ")),
      " ",
      verdicts(one.detail.slo),
    ),
    h(
      "div",
      { class: "tiles" },
      tile(time(whole), "E2E"),
      tile(one.ttft_us === null ? "-" : time(one.ttft_us / 1e6), "TTFT"),
      tile(one.tpot_us === null ? "-" : time(one.tpot_us / 1e6), "TPOT"),
      tile(
        count(one.prompt_tokens),
        "tokens in",
        `${count(one.cached_tokens)} cached, ${count(one.computed_tokens)} computed`,
      ),
      tile(count(one.output_tokens), "tokens out", `of at most ${count(one.max_tokens)}`),
      tile(time(one.device_us / 1e6), "device time", one.cost_nusd ? dollars(one.cost_nusd / 1e9) : "no price known"),
    ),
    card("Where its time went", drawing(one.phases, whole, marks, one)),
    strip(one.steps, whole, gap),
    card(
      "Why it took what it took",
      h(
        "ul",
        { class: "words" },
        one.words.map((sentence) => h("li", null, linked(sentence, one.request))),
      ),
    ),
    one.ahead.length
      ? card(
          "Who ran while it waited",
          table(
            ["request", "key", "tokens in", "out", "ran of its wait", "ended after it came"],
            one.ahead
              .slice(0, 20)
              .map((other) => [
                link(other.request),
                other.key || "-",
                count(other.prompt_tokens),
                count(other.output_tokens),
                time(other.overlap),
                time(Math.max(0, other.ended)),
              ]),
            2,
          ),
        )
      : null,
    details(one),
  );
}

const link = (id) => h("a", { href: `#/request/${encodeURIComponent(id)}`, title: id }, short(id));

function linked(sentence, own) {
  return pieces(sentence).map((part) => (part.id && part.id !== own ? link(part.id) : (part.id ?? part.text)));
}

function verdicts(slo) {
  return Object.entries(slo ?? {}).map(([name, [bound, met]]) => [
    h(
      "span",
      { class: `chip ${met ? "ok" : "failed"}` },
      `${name.toUpperCase()} ≤ ${time(bound)}: ${met ? "kept" : "missed"}`,
    ),
    " ",
  ]);
}

function details(one) {
  const facts = {
    "x-request-id": one.http_request,
    hardware: one.hardware,
    "decode steps": count(one.decode_steps),
    "stalled steps": count(one.stalled_steps),
    preemptions: count(one.preemptions),
    "loaded from tiers": `${count(one.loaded_tokens)} tokens`,
    ...Object.fromEntries(
      Object.entries(one.detail.params ?? {}).map(([name, value]) => [name, JSON.stringify(value)]),
    ),
  };
  return h(
    "details",
    { class: "card" },
    h("summary", null, "Everything else"),
    h(
      "dl",
      { class: "facts" },
      Object.entries(facts)
        .filter(([, value]) => value !== "" && value !== null)
        .map(([name, value]) => [h("dt", null, name), h("dd", null, String(value))]),
    ),
  );
}
