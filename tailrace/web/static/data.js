// What is drawn, worked out of what came. Pure: no page, no network, no clock.

/** Takes an event stream apart (WHATWG HTML, server-sent events). `add` gives the events that a piece completes. */
export class Events {
  #rest = "";

  add(text) {
    const blocks = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = blocks.pop();
    return blocks.map(parsed).filter((event) => event.data !== "");
  }
}

function parsed(block) {
  const event = { name: "message", data: "" };
  const lines = [];
  for (const line of block.split(/\r?\n/)) {
    const [, field, value] = /^([a-z]*): ?(.*)$/.exec(line) ?? [];
    if (field === "event") event.name = value;
    if (field === "data") lines.push(value);
  }
  event.data = lines.join("\n");
  return event;
}

/** Samples (lists in the order of `fields`) as objects. */
export function named(fields, sample) {
  return Object.fromEntries(fields.map((field, at) => [field, sample[at]]));
}

/** How much `field` has grown a second between two samples. What counts from a start again has grown by nothing. */
export function growth(before, after, field) {
  const seconds = after.at - before.at;
  return seconds > 0 ? Math.max(0, after[field] - before[field]) / seconds : 0;
}

/** The mean of what a pair of sum and count has seen between two samples; null where that is nothing. */
export function mean(before, after, name) {
  const seen = after[`${name}_count`] - before[`${name}_count`];
  return seen > 0 ? (after[`${name}_sum`] - before[`${name}_sum`]) / seen : null;
}

/** The first of the samples of the last so many seconds. */
export function since(samples, seconds) {
  const last = samples[samples.length - 1];
  return samples.find((sample) => sample.at >= last.at - seconds) ?? last;
}

/** Round values from `low` to `high`, about so many. */
export function ticks(low, high, about = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const made = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * 1.000001; at += 1)
    made.push(Number((at * step).toPrecision(12)));
  return made;
}

/** Phases [[name, seconds], ...] one after the other: {name, seconds, from, share}, the last two of the whole. */
export function waterfall(phases, whole) {
  let done = 0;
  return phases.map(([name, seconds]) => {
    const bar = { name, seconds, from: whole ? done / whole : 0, share: whole ? seconds / whole : 0 };
    done += seconds;
    return bar;
  });
}

/** Steps of one request [[begin, end, [who, prefill, decode, stalled]], ...] of the same kind that touch, as one. */
export function runs(steps) {
  const made = [];
  for (const [begin, end, part] of steps) {
    const kind = kindOf(part);
    const last = made[made.length - 1];
    if (last && last.kind === kind && kind !== "prefill" && begin - last.end < 0.002) {
      last.end = end;
      last.steps += 1;
      last.tokens += part[2];
    } else {
      made.push({ kind, begin, end, steps: 1, tokens: kind === "prefill" ? part[1] : part[2], cause: part[3] ?? "" });
    }
  }
  return made;
}

/** What a request did in a step, of its [who, prefill, decode, stalled]. */
export function kindOf(part) {
  return part[3] ? "stall" : part[1] ? "prefill" : "decode";
}

/** The least tokens of the power-of-two bin that a cell of the map has, and one more than the most. */
export function bin(power) {
  return power === 0 ? [0, 1] : [2 ** (power - 1), 2 ** power];
}

/** A bin in words: 0, 1, 2-3, 4-7, 1k-2k. */
export function binName(power) {
  const [low, next] = bin(power);
  const shown = (number) => (number >= 1024 ? `${number / 1024}k` : String(number));
  if (next - low === 1) return String(low);
  return low >= 1024 ? `${shown(low)}-${shown(next)}` : `${low}-${next - 1}`;
}

/** The cells of a map by place: rows of outputs from the most down, columns of prompts from the least up. */
export function grid(cells) {
  if (!cells.length) return { columns: [], rows: [], at: new Map() };
  const range = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return Array.from({ length: high - low + 1 }, (_, place) => low + place);
  };
  return {
    columns: range(cells.map((cell) => cell.prompt)),
    rows: range(cells.map((cell) => cell.output)).reverse(),
    at: new Map(cells.map((cell) => [`${cell.prompt},${cell.output}`, cell])),
  };
}

/** What the browser saw of an answer, of the times (ms) at which pieces with text came, and of the usage. */
export function seen(sent, arrivals, tokens) {
  if (!arrivals.length) return { ttft: null, each: null, gap: null };
  const [first, last] = [arrivals[0], arrivals[arrivals.length - 1]];
  const gaps = arrivals.slice(1).map((at, place) => at - arrivals[place]);
  return {
    ttft: (first - sent) / 1000,
    each: tokens > 1 ? (last - first) / 1000 / (tokens - 1) : null,
    gap: gaps.length ? Math.max(...gaps) / 1000 : null,
  };
}

/** A sentence cut into words and ids of requests: [{text}, {id}]. */
export function pieces(sentence) {
  return sentence
    .split(/\b((?:chatcmpl|cmpl|msg|resp|embd|rerank|score)[-_][0-9a-f]{24}(?:\.\d+)?)/)
    .map((part, place) => (place % 2 ? { id: part } : { text: part }))
    .filter((part) => part.id || part.text);
}

/** "#/requests?order=e2e" as {path: ["requests"], query: {order: "e2e"}}. */
export function route(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const decode = (text) => {
    try {
      return decodeURIComponent(text.replace(/\+/g, " "));
    } catch {
      return text;
    }
  };
  const pairs = query
    .split("&")
    .filter(Boolean)
    .map((pair) => pair.split("=").map(decode));
  return {
    path: path.split("/").filter(Boolean).map(decode),
    query: Object.fromEntries(pairs.map(([k, v = ""]) => [k, v])),
  };
}

/** The query of an address, without what is empty. */
export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `?${given.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}` : "";
}

/** When a step ended; 0 where there is none. */
export const end = (step) => (step ? step.begin + step.seconds : 0);

/** What time it is on the server, of whose clock its last sample and its last step are: the browser's may be off. */
export const latest = (samples, step) => Math.max(samples[samples.length - 1]?.at ?? 0, end(step));

/** Whether another key may be given what this one (or none) was refused. */
export const wantsKey = (error) => error.status === 401 || error.code === "insufficient_scope";
