// Figures and their tables: scales, axes, lines and labels that every figure shares.

import { el, scrollRegion, svg } from "./dom.js";

const LABEL_GAP = 15;

// --- tables

export const row = (cells, attributes = {}) =>
  el("tr", attributes, cells.map((cell, i) => (i ? el("td", {}, cell) : el("th", { scope: "row" }, cell))));

export function table(heads, bodies, label) {
  const head = el("thead", {}, el("tr", {}, heads.map((title) => el("th", { scope: "col" }, title))));
  return scrollRegion(label, el("table", {}, head, bodies));
}

export function asTable(heads, rows) {
  const body = el("tbody", {}, rows.map((cells) => row(cells)));
  return el("details", {}, el("summary", {}, "Show as table"), table(heads, body, "Table of the figure"));
}

// --- drawing

export function scales(width, height, [x0, x1], [y0, y1], { left, right, top, bottom, inset }) {
  const at = { width, height, left, right: width - right, top, bottom: height - bottom, inset };
  at.x = (value) => at.left + at.inset + ((value - x0) / (x1 - x0)) * (at.right - at.left - 2 * at.inset);
  at.y = (value) => at.bottom - ((value - y0) / (y1 - y0)) * (at.bottom - at.top);
  return at;
}

export const frame = (at, width) => ({ viewBox: `0 0 ${width} ${at.height}`, height: at.height });
export const line = (look, x1, y1, x2, y2) => svg("line", { class: look, x1, y1, x2, y2 });
export const polyline = (points, look = "") => svg("polyline", { class: `curve ${look}`, points: points.join(" ") });
export const band = (at, y) =>
  svg("rect", { class: "band", x: at.left, y, width: at.right - at.left, height: at.bottom - y });

export function axes(at, xs, ys, xText, yText, xTitle, yTitle) {
  return [
    ys.map((value) => line("grid", at.left, at.y(value), at.right, at.y(value))),
    ys.map((value) => svg("text", { x: at.left - 8, y: at.y(value) + 4, "text-anchor": "end" }, yText(value))),
    xs.map((value) => svg("text", { x: at.x(value), y: at.bottom + 18, "text-anchor": "middle" }, xText(value))),
    line("axis", at.left, at.bottom, at.right, at.bottom),
    svg("text", { x: (at.left + at.right) / 2, y: at.bottom + 38, "text-anchor": "middle" }, xTitle),
    svg("text", { x: 0, y: 12 }, yTitle),
  ].flat(2);
}

/** Move labels beside a figure apart if they would overlap. */
export function spaced(labels) {
  const sorted = labels.sort((one, two) => one.y - two.y);
  for (let i = 1; i < sorted.length; i += 1) sorted[i].y = Math.max(sorted[i].y, sorted[i - 1].y + LABEL_GAP);
  return sorted;
}
