// Elements, numbers and members. Every text is inserted as a text node: nothing here parses markup.

const LONG = 420;
const COLOURS = 10;
const SVG = "http://www.w3.org/2000/svg";

/** Create an element: attributes by name, `on` for listeners, children as nodes or text. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** A text without control characters, and without those that change the direction of other text; as in core/text.py. */
export const printable = (text) =>
  String(text).replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g, "");

const clean = (children) => children.map((child) => (child instanceof Node ? child : printable(child)));

function filled(node, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : printable(value));
  }
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  node.append(...clean(children.flat().filter((child) => child !== null && child !== undefined && child !== false)));
  return node;
}

export const button = (label, click, look = "") => el("button", { class: look, type: "button", on: { click } }, label);
export const note = (...children) => el("p", { class: "muted small" }, ...children);

/** Text from data, with its own direction, which does not affect other elements. */
export const data = (text, tag = "span") => el(tag, { class: "data", dir: "auto" }, text);

/** Text from data; long texts are collapsed, with a button to expand them. */
export function longText(text, limit = LONG) {
  const body = el("p", { class: "data", dir: "auto" }, text);
  if (text.length <= limit) return el("div", { class: "text" }, body);
  body.classList.add("clamp");
  const more = el("button", { class: "plain small", type: "button", "aria-expanded": "false" }, "Show all");
  more.addEventListener("click", () => {
    const folded = body.classList.toggle("clamp");
    more.setAttribute("aria-expanded", String(!folded));
    more.textContent = folded ? "Show all" : "Show less";
  });
  return el("div", { class: "text" }, body, more);
}

export function clear(node, ...children) {
  node.replaceChildren(...clean(children.flat().filter(Boolean)));
  return node;
}

/** Set the width of a part of a bar, through the CSSOM, which the content policy allows. */
export function sized(node, share) {
  node.style.width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(2)}%`;
  return node;
}

// --- numbers

export const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−");
export const count = (value) => value.toLocaleString("en");
export const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many}`;
export const hasEnds = (interval) => Boolean(interval) && interval.low !== null;
export const between = (interval, digits = 4) =>
  hasEnds(interval) ? `${number(interval.low, digits)} to ${number(interval.high, digits)}` : "–";

export function percent(share) {
  if (share === null || share === undefined) return "–";
  if (share > 0 && share < 0.005) return "<1\u00a0%";
  if (share > 0.995 && share < 1) return ">99\u00a0%";
  return `${Math.round(100 * share)}\u00a0%`;
}

// --- members

export const colour = (member) => `m${member % COLOURS}`;
export const badge = (member) => el("span", { class: `badge ${colour(member)}` }, String(member));

/** The number and the name of a member. */
export const memberName = (member, name, ...more) =>
  el("span", { class: "who" }, badge(member), el("span", {}, data(name), ...more));

/** A region that scrolls sideways if its content is wide; shadows mark the edges that hide something. */
export const scrollRegion = (label, content) =>
  el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);

export function meter(share, member = null, mark = null) {
  const bar = el("div", { class: `meter ${member === null ? "" : colour(member)}` }, sized(el("i"), share));
  if (mark !== null) {
    const line = el("b");
    line.style.left = `calc(${(100 * Math.min(mark, 1)).toFixed(2)}% - 1px)`;
    bar.append(line);
  }
  return bar;
}

/** A member as a row of a list: number, name, bar and value. */
export function memberRow(member, name, bar, value, first = false) {
  const label = data(name);
  label.classList.add("name");
  const row = el("li", { class: first ? "first" : "" }, badge(member), label, bar);
  row.append(el("span", { class: "percent" }, ...[value].flat()));
  return row;
}

/** Two responses side by side, each with a heading. */
export function versus(left, leftText, right, rightText) {
  return el(
    "div",
    { class: "versus" },
    el("div", {}, el("h4", {}, left), longText(leftText)),
    el("div", {}, el("h4", {}, right), longText(rightText)),
  );
}

// --- keys and requests

/** Move the focus among elements with arrow keys; only one of them is a tab stop. */
export function roving(nodes, onMove = () => {}) {
  nodes.forEach((node, i) => {
    node.setAttribute("tabindex", i === 0 ? "0" : "-1");
    node.addEventListener("keydown", (event) => {
      const last = nodes.length - 1;
      const places = { ArrowRight: i === last ? 0 : i + 1, ArrowLeft: i === 0 ? last : i - 1, Home: 0, End: last };
      const next = places[event.key];
      if (next === undefined) return;
      event.preventDefault();
      nodes.forEach((other, j) => other.setAttribute("tabindex", j === next ? "0" : "-1"));
      nodes[next].focus();
      onMove(next);
    });
  });
}

/** Run a request: the panel is busy meanwhile, and `alert` shows the error if it fails. */
export async function attempt(panel, alert, work) {
  panel.setAttribute("aria-busy", "true");
  alert.hidden = true;
  try {
    return await work();
  } catch (error) {
    alert.textContent = printable(error.message);
    alert.hidden = false;
    return undefined;
  } finally {
    panel.setAttribute("aria-busy", "false");
  }
}

export const alertLine = () => el("p", { class: "alert", role: "alert", hidden: true });
