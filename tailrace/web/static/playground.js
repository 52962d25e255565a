// A conversation with the model, and what the browser saw of each answer.
import { h, show, select, empty } from "/ui/dom.js";
import { count, time } from "/ui/format.js";
import { seen } from "/ui/data.js";
import { bearer, events, key, refusal } from "/ui/server.js";

const KEY = "tailrace-playground-key";

/** The conversation outlives a visit to another page, not the tab. */
const talk = { messages: [], system: "", temperature: "0.7", most: "256", model: "" };

export function playground(body, app) {
  const state = app.state;
  if (state.task !== "generate" && state.task !== null) {
    show(
      body,
      h("h1", null, "Playground"),
      empty("This model generates no text.", `${state.model} embeds or scores texts.`),
    );
    return null;
  }
  let stop = null;
  const list = h("ol", { class: "talk", "aria-live": "polite", "aria-label": "Conversation" });
  const prompt = h("textarea", {
    id: "prompt",
    rows: "3",
    placeholder: "Ask something. Enter sends, Shift+Enter is a new line.",
    "aria-label": "Your message",
  });
  const send = h("button", { type: "submit", class: "main" }, "Send");
  const halt = h("button", { type: "button", hidden: true, onclick: () => stop?.abort() }, "Stop");
  const fresh = h(
    "button",
    {
      type: "button",
      onclick: () => {
        stop?.abort();
        talk.messages = [];
        draw();
      },
    },
    "New conversation",
  );
  const system = h(
    "textarea",
    {
      rows: "2",
      placeholder: "none",
      oninput: (event) => {
        talk.system = event.target.value;
      },
    },
    talk.system,
  );
  const number = (name, label, attributes) =>
    h(
      "label",
      { class: "field" },
      h("span", null, label),
      h("input", {
        type: "number",
        value: talk[name],
        ...attributes,
        oninput: (event) => {
          talk[name] = event.target.value;
        },
      }),
    );
  const other = h("input", {
    type: "password",
    autocomplete: "off",
    value: sessionStorage.getItem(KEY) ?? "",
    placeholder: "the same",
    oninput: (event) => sessionStorage.setItem(KEY, event.target.value.trim()),
  });
  const models = state.models.map((name) => [name, name]);

  function draw() {
    show(
      list,
      talk.messages.length
        ? talk.messages.map(entry)
        : h(
            "li",
            { class: "nothing" },
            empty("Nothing was said yet.", `This asks ${state.model} through the same API that everybody uses.`),
          ),
    );
  }

  async function ask(text) {
    const answer = { role: "assistant", text: "", facts: "", id: null, error: "" };
    talk.messages.push({ role: "user", text }, answer);
    const busy = (on) => {
      halt.hidden = !on;
      send.disabled = on;
    };
    busy(true);
    stop = new AbortController();
    draw();
    const shown = list.lastElementChild;
    const update = () => show(shown, entryParts(answer));
    try {
      await stream(answer, stop.signal, update);
    } catch (error) {
      answer.error = error.name === "AbortError" ? "stopped" : error.message;
    }
    stop = null;
    busy(false);
    update();
    prompt.focus();
  }

  async function stream(answer, signal, update) {
    const history = talk.messages
      .slice(0, -1)
      .filter((one) => one.text)
      .map((one) => ({ role: one.role, content: one.text }));
    const messages = talk.system ? [{ role: "system", content: talk.system }, ...history] : history;
    const given = {
      model: talk.model || state.model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(talk.temperature),
      max_tokens: Number(talk.most),
    };
    const arrivals = [];
    const sent = performance.now();
    const came = await fetch("/v1/chat/completions", {
      method: "POST",
      signal,
      body: JSON.stringify(given),
      headers: {
        "Content-Type": "application/json",
        "x-tailrace-workload": "playground",
        ...bearer(sessionStorage.getItem(KEY) || key()),
      },
    });
    if (!came.ok) throw await refusal(came);
    let usage = null;
    try {
      for await (const event of events(came)) {
        if (event.data === "[DONE]") break;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Error(chunk.error.message);
        answer.id = chunk.id ?? answer.id;
        usage = chunk.usage ?? usage;
        const delta = chunk.choices?.[0]?.delta ?? {};
        const text = (delta.reasoning_content ?? "") + (delta.content ?? "");
        if (text) {
          arrivals.push(performance.now());
          answer.text += text;
        }
        answer.facts = facts(seen(sent, arrivals, usage?.completion_tokens ?? 0), usage);
        update();
      }
    } finally {
      answer.facts = facts(seen(sent, arrivals, usage?.completion_tokens ?? 0), usage);
    }
  }

  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  const form = h(
    "form",
    {
      class: "ask",
      onsubmit: (event) => {
        event.preventDefault();
        const text = prompt.value.trim();
        if (!text || stop) return;
        prompt.value = "";
        ask(text);
      },
    },
    prompt,
    h("div", { class: "buttons" }, send, halt, fresh),
  );
  show(
    body,
    h("h1", null, "Playground"),
    h(
      "div",
      { class: "beside" },
      h("section", { class: "card" }, list, form),
      h(
        "section",
        { class: "card settings" },
        h("h2", null, "Settings"),
        models.length > 1
          ? select("Model", models, talk.model || state.model, (value) => {
              talk.model = value;
            })
          : null,
        number("temperature", "Temperature", { min: "0", max: "2", step: "0.1" }),
        number("most", "Most tokens", { min: "1", max: String(state.max_context), step: "1" }),
        h("label", { class: "field" }, h("span", null, "System prompt"), system),
        state.asks
          ? h("label", { class: "field" }, h("span", null, "Another API key, if yours may not ask"), other)
          : null,
      ),
    ),
  );
  draw();
  return () => stop?.abort();
}

const facts = ({ ttft, each, gap }, usage) =>
  [
    ttft === null ? "waiting for the first token" : `TTFT ${time(ttft)}`,
    each === null ? null : `${time(each)} a token`,
    gap === null ? null : `longest gap ${time(gap)}`,
    usage ? `${count(usage.completion_tokens)} tokens, prompt ${count(usage.prompt_tokens)}` : null,
  ]
    .filter(Boolean)
    .join(" · ");

const entry = (one) => h("li", { class: one.role }, entryParts(one));

const entryParts = (one) => [
  h("span", { class: "role" }, one.role === "user" ? "You" : "Model"),
  h("p", { class: "text" }, one.text),
  one.role === "assistant"
    ? h(
        "p",
        { class: "soft" },
        one.facts,
        one.error ? [" · ", h("span", { class: "bad" }, one.error)] : null,
        one.id ? [" · ", h("a", { href: `#/request/${encodeURIComponent(one.id)}` }, "where the time went")] : null,
      )
    : null,
];
