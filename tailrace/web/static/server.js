// The server: JSON, and the stream of a second's news. The key stays in this tab (sessionStorage).
import { Events } from "/ui/data.js";

const KEY = "tailrace-key";
const LONGEST_PAUSE = 10;

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The server did not answer at all. */
export class Gone extends Error {}

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (value) => sessionStorage.setItem(KEY, value);

export const bearer = (value = key()) => (value ? { Authorization: `Bearer ${value}` } : {});

/** What an answer that is an error says. */
export async function refusal(answer) {
  const told = (await answer.json().catch(() => ({}))).error ?? {};
  return new Refused(answer.status, told.code, told.message ?? `the server answered ${answer.status}`);
}

/** An answer to GET /ui/api/PATH. Throws Refused or Gone. */
export async function get(path, signal) {
  let answer;
  try {
    answer = await fetch(`/ui/api/${path}`, { headers: bearer(), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("the server does not answer");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

/** Pieces of the body of an answer, as events. */
export async function* events(answer) {
  const taken = new Events();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield* taken.add(value);
  }
}

/** Follows a running server for as long as the page can be seen. `on` hears history, now, and how the line is: live,
 * lost (with seconds until the next try), or refused (with the error). */
export function follow(on) {
  let stop = null;

  async function once(signal) {
    const answer = await fetch("/ui/api/live", { headers: bearer(), signal, cache: "no-store" });
    if (!answer.ok) throw await refusal(answer);
    for await (const event of events(answer)) {
      on.line("live");
      on[event.name]?.(JSON.parse(event.data));
    }
    throw new Gone("the stream has ended");
  }

  async function run(signal) {
    let pause = 1;
    while (!signal.aborted) {
      const began = Date.now();
      try {
        await once(signal);
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && [401, 403].includes(error.status)) {
          on.line("refused", error);
          return;
        }
        pause = Date.now() - began > 5000 ? 1 : Math.min(pause * 2, LONGEST_PAUSE);
        for (let left = pause; left > 0 && !signal.aborted; left -= 1) {
          on.line("lost", left);
          await new Promise((resolve) => setTimeout(resolve, 1000));
        }
      }
    }
  }

  function begin() {
    stop?.abort();
    stop = new AbortController();
    run(stop.signal);
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? stop?.abort() : begin()));
  if (!document.hidden) begin();
  return begin;
}
