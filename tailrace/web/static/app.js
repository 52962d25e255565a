// The frame around the pages: which one is shown, the key, light or dark, and whether the server is still there.
import { h, s, show, empty } from "/ui/dom.js";
import { named, route, wantsKey } from "/ui/data.js";
import { follow, get, setKey, Gone, Refused } from "/ui/server.js";
import { overview } from "/ui/overview.js";
import { requests } from "/ui/requests.js";
import { request } from "/ui/request.js";
import { steps } from "/ui/steps.js";
import { shapes } from "/ui/shapes.js";
import { cost } from "/ui/cost.js";
import { playground } from "/ui/playground.js";

const PAGES = [
  { path: "", name: "Overview", open: overview, icon: "M3 20V10m6 10V4m6 16v-8m6 8V7" },
  { path: "requests", name: "Requests", open: requests, icon: "M4 6h16M4 12h16M4 18h10" },
  { path: "steps", name: "Steps", open: steps, live: true, icon: "M3 5h6v4H3zm8 5h6v4h-6zm5 5h5v4h-5z" },
  { path: "shapes", name: "Shapes", open: shapes, icon: "M4 4v16h16M8 15h3v-3H8zm5-5h3V7h-3zm4-4h2" },
  { path: "cost", name: "Cost", open: cost, icon: "M12 3v18M16.5 7C15 5 8 5 8 8.500s8.500 3 8.500 6.500-7 4-9 1.500" },
  { path: "playground", name: "Playground", open: playground, live: true, icon: "M4 5h16v11H9l-5 4z" },
];
const KEPT = 300;
const main = document.getElementById("main");
const banner = document.getElementById("banner");

/** What all pages share. `samples` and `now` are a running server's; `listeners` are called when they have changed. */
const app = { state: null, samples: [], fields: [], now: null, listeners: new Set(), go };
let leave = () => {};
let generation = 0;

function go(hash) {
  location.hash = hash;
}

async function showPage() {
  const mine = (generation += 1);
  leave();
  leave = () => {};
  app.listeners.clear();
  const { path, query } = route(location.hash);
  const [first = "", ...rest] = path;
  const page =
    first === "request"
      ? { path: "requests", name: "Request", open: request }
      : PAGES.find((one) => one.path === first);
  drawNavigation(page?.path);
  document.title = `${page?.name ?? "Nothing here"} · Tailrace`;
  if (!page) {
    show(main, empty("There is no such page.", h("a", { href: "#/" }, "To the overview")));
    return;
  }
  if (page.live && !app.state.live) {
    show(
      main,
      h("h1", null, page.name),
      empty(
        "This needs a running server.",
        `What you see is the ledger ${app.state.ledger}, without a server: live load, steps and the playground are part of the dashboard of `,
        h("code", null, "tailrace serve --ui"),
        ".",
      ),
    );
    return;
  }
  const body = h("div", { class: `page ${page.name.toLowerCase()}` });
  show(main, body);
  try {
    const left = await page.open(body, app, rest, query);
    if (mine === generation) leave = left ?? (() => {});
    else left?.();
  } catch (error) {
    if (mine === generation) failed(body, error);
  }
}

/** Says on a page why it cannot be shown. */
function failed(body, error) {
  if (error instanceof Refused && wantsKey(error)) return askKey(error.message);
  const title =
    error instanceof Gone
      ? "The server does not answer."
      : error instanceof Refused && error.code === "ledger_unavailable"
        ? "The ledger cannot be read."
        : error instanceof Refused && error.code === "no_ledger"
          ? "There is no ledger."
          : error instanceof Refused
            ? "That cannot be shown."
            : "This page has a fault.";
  show(
    body,
    h(
      "div",
      { class: "empty bad", role: "alert" },
      h("b", null, title),
      h("p", { class: "soft" }, error.message),
      h("button", { type: "button", onclick: () => (app.state ? showPage() : start()) }, "Try again"),
    ),
  );
  if (!(error instanceof Refused || error instanceof Gone)) console.error(error);
}

function drawNavigation(current) {
  const shown = PAGES.filter((page) => !page.live || app.state?.live);
  show(
    document.getElementById("nav"),
    shown.map((page) =>
      h(
        "a",
        { href: `#/${page.path}`, "aria-current": page.path === current ? "page" : null },
        s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, s("path", { d: page.icon })),
        h("span", null, page.name),
      ),
    ),
  );
}

// The key.

function askKey(why) {
  const dialog = document.getElementById("key");
  document.getElementById("key-why").textContent = why;
  show(
    main,
    h(
      "div",
      { class: "empty bad", role: "alert" },
      h("b", null, "This needs another key."),
      h("p", { class: "soft" }, why),
      h("button", { type: "button", onclick: () => dialog.showModal() }, "Use another key"),
    ),
  );
  if (!dialog.open) dialog.showModal();
}

document.querySelector("#key form").addEventListener("submit", () => {
  const field = document.getElementById("key-field");
  setKey(field.value.trim());
  field.value = "";
  start();
});

document.getElementById("key-leave").addEventListener("click", () => document.getElementById("key").close());

// Light and dark.

function drawTheme() {
  const chosen = document.documentElement.dataset.theme;
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const button = document.getElementById("theme");
  button.setAttribute("aria-label", dark ? "Switch to light" : "Switch to dark");
  button.title = button.getAttribute("aria-label");
  const sun =
    "M12 7a5 5 0 1 0 0 10 5 5 0 0 0 0-10M12 1v3m0 16v3M1 12h3m16 0h3M4.200 4.200l2 2m11.600 11.600l2 2m0-15.600l-2 2M6.200 17.800l-2 2";
  show(
    button,
    s(
      "svg",
      { viewBox: "0 0 24 24", "aria-hidden": "true" },
      s("path", { d: dark ? sun : "M20 14.500A8.500 8.500 0 1 1 9.500 4a7 7 0 0 0 10.500 10.500z" }),
    ),
  );
  return dark;
}

document.getElementById("theme").addEventListener("click", () => {
  const next = drawTheme() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("tailrace-theme", next);
  drawTheme();
  app.listeners.forEach((listener) => listener());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTheme);

// The server.

function line(kind, more) {
  const link = document.getElementById("link");
  const words = { live: "live", lost: "connection lost", refused: "no access", read: "ledger" }[kind];
  if (link.dataset.kind !== kind) {
    link.dataset.kind = kind;
    link.textContent = words;
  }
  banner.hidden = kind !== "lost";
  if (kind === "lost")
    banner.textContent = `The connection to the server is lost. What you see is from before; trying again in ${more} s.`;
  if (kind === "refused") wantsKey(more) ? askKey(more.message) : failed(main, more);
}

const on = {
  line,
  history: ({ fields, samples }) => {
    app.fields = fields;
    app.samples = samples.map((sample) => named(fields, sample));
  },
  now: (now) => {
    app.now = now;
    const sample = named(app.fields, now.sample);
    if (sample.at !== app.samples[app.samples.length - 1]?.at) app.samples.push(sample);
    app.samples.splice(0, app.samples.length - KEPT);
    app.listeners.forEach((listener) => listener());
  },
};

let restart = null;

async function start() {
  try {
    app.state = await get("state");
  } catch (error) {
    if (error instanceof Gone) {
      line("lost", 3);
      setTimeout(start, 3000);
      return;
    }
    drawNavigation(null);
    failed(main, error);
    return;
  }
  banner.hidden = true;
  show(document.getElementById("what"), app.state.live ? app.state.model : app.state.ledger);
  document.getElementById("what").title = app.state.live
    ? `${app.state.model}, Tailrace ${app.state.version}`
    : app.state.ledger;
  if (!app.state.live) line("read");
  else if (restart) restart();
  else restart = follow(on);
  showPage();
}

drawTheme();
addEventListener("hashchange", () => {
  if (app.state) showPage();
  scrollTo(0, 0);
});
start();
