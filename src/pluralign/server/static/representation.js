// How well individuals are represented: accuracy on a rater's other votes, by number of the rater's choices.

import { clear, count, el, note, number, percent, signed, svg, withEnds } from "./dom.js";
import { axes, frame, line, polyline, row, scales, spaced, table } from "./figures.js";

const DRAWN = {
  posterior: "posterior over members",
  member: "most likely member",
  own: "reward of the rater alone",
  soft_bt: "soft BT, no choices",
};
const HEIGHT = 360;
const LEGEND_LINE = 18;

const label = (one) => (one.choices === null ? "all" : String(one.choices));

/** The section; `redraws` are the functions that draw the figures of the tab when its width changes. */
export function representation({ names, legend, rows, verdicts, notes }, redraws) {
  const place = el("div");
  redraws.push(() => clear(place, curves(rows, place.clientWidth)));
  return el(
    "div",
    { class: "individuals" },
    el("h2", {}, "How well individuals are represented"),
    el("p", {}, "Each rater’s votes are predicted from some of the same rater’s choices on other prompts."),
    verdicts.map(({ kind, text }) => el("p", { class: `verdict ${kind}` }, text)),
    el(
      "figure",
      {},
      el("h3", {}, "Accuracy by number of choices"),
      place,
      el(
        "figcaption",
        {},
        "Mean accuracy over raters, with 95 % intervals. Fewer raters have many choices, so compare the lines at one ",
        "number of choices.",
      ),
    ),
    scores("Accuracy", "accuracy"),
    scores("Log loss", "log_loss"),
    note(`${legend} ${notes.join(" ")} Accuracy counts a predicted tie as ½. Lower log loss is better.`),
  );

  function scores(title, score) {
    const heads = ["choices", "raters", ...Object.values(names), "posterior − soft BT, 95 %"];
    const body = rows.map((one) => {
      const gap = one.predictors.posterior[`${score}_difference`];
      const means = Object.keys(names).map((key) => number(one.predictors[key][score].mean, 3));
      return row([label(one), count(one.raters), ...means, withEnds(gap.mean, gap, 3, signed)]);
    });
    return el("div", {}, el("h3", {}, title), table(heads, el("tbody", {}, body), `${title} by number of choices`));
  }
}

function curves(rows, width) {
  const keys = Object.keys(DRAWN);
  const accuracy = (one, key) => one.predictors[key].accuracy;
  const ends = rows.map((one) => accuracy(one, "posterior")).filter((one) => one.low !== null);
  const means = rows.flatMap((one) => keys.map((key) => accuracy(one, key).mean));
  const low = Math.floor(20 * Math.min(...means, ...ends.map((one) => one.low))) / 20;
  const high = Math.ceil(20 * Math.max(...means, ...ends.map((one) => one.high))) / 20;
  const step = high - low > 0.3 ? 0.1 : 0.05;
  const ticks = Array.from({ length: Math.round((high - low) / step) + 1 }, (_, i) => low + i * step);
  const narrow = width < 520;
  const margins = { left: 48, right: narrow ? 12 : 220, top: 30, bottom: 42, inset: 16 };
  const places = rows.map((_, i) => i);
  const at = scales(width, HEIGHT, [0, Math.max(rows.length - 1, 1)], [low, high], margins);
  const last = rows.at(-1);
  // labels beside the ends of the lines, or below the figure if it is narrow
  const beside = keys.map((key, i) => {
    const { mean } = accuracy(last, key);
    const y = narrow ? HEIGHT + LEGEND_LINE * (i + 0.5) : at.y(mean);
    return { y, class: `line-${key}`, text: `${DRAWN[key]} ${percent(mean)}` };
  });
  const labels = spaced(beside);
  const height = HEIGHT + (narrow ? LEGEND_LINE * (keys.length + 0.5) : 0);
  const spoken = keys.map((key) => `${DRAWN[key]} ${percent(accuracy(last, key).mean)}`).join(", ");
  return svg(
    "svg",
    { ...frame({ ...at, height }, width), role: "img", "aria-label": `Accuracy with ${label(last)} choices: ${spoken}` },
    axes(at, places, ticks, (i) => label(rows[i]), percent, "choices per rater", "accuracy on other votes"),
    rows.map((one, i) => {
      const interval = accuracy(one, "posterior");
      return interval.low !== null && line("whisker", at.x(i), at.y(interval.low), at.x(i), at.y(interval.high));
    }),
    keys.map((key) => polyline(rows.map((one, i) => [at.x(i), at.y(accuracy(one, key).mean)]), `line-${key}`)),
    rows.map((one, i) => {
      return svg("circle", { class: "dot", cx: at.x(i), cy: at.y(accuracy(one, "posterior").mean), r: 4 });
    }),
    labels.map((one) => svg("text", { class: one.class, x: narrow ? at.left : at.right + 8, y: one.y + 4 }, one.text)),
  );
}
