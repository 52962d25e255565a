// Elements. Whatever comes from elsewhere goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, given]) => element.style.setProperty(key, given));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Gives an element new children. */
export function show(element, ...children) {
  element.replaceChildren(
    ...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** A number with its name, and a line more. */
export const tile = (value, name, more = "", kind = "") =>
  h(
    "div",
    { class: `tile ${kind}` },
    h("b", null, value),
    h("span", { class: "name" }, name),
    h("span", { class: "soft" }, more),
  );

/** A part of a page with a heading. */
export const card = (title, ...content) => h("section", { class: "card" }, title && h("h2", null, title), content);

/** What there is instead of something that is not there. */
export const empty = (title, ...hint) =>
  h("div", { class: "empty" }, h("b", null, title), h("p", { class: "soft" }, hint));

/** A choice: options are [value, name]. */
export function select(label, options, value, changed) {
  const made = h("select", { onchange: (event) => changed(event.target.value) });
  made.append(...options.map(([key, name]) => h("option", { value: key, selected: key === value }, name)));
  return h("label", { class: "field" }, h("span", null, label), made);
}

/** A table: heads are names, rows lists of cells; the first `left` columns are words. */
export const table = (heads, rows, left = 1) =>
  h(
    "div",
    { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" },
    h(
      "table",
      null,
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          heads.map((head, at) => h("th", { scope: "col", class: at < left ? "left" : "" }, head)),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            null,
            row.map((cell, at) => h("td", { class: at < left ? "left" : "" }, cell)),
          ),
        ),
      ),
    ),
  );

export const SPANS = [
  ["3600", "last hour"],
  ["86400", "last 24 hours"],
  ["604800", "last 7 days"],
  ["2592000", "last 30 days"],
  ["0", "always"],
];
