// Calibration: predicted against observed shares, and the baselines.

import { between, clear, count, data, el, hasEnds, note, number, percent, plural, roving } from "./dom.js";
import { scrollRegion, svg, versus } from "./dom.js";

const LABEL_GAP = 15;
const LINES = { constant_half: "always ½", floor: "floor", soft_bt: "soft BT", noise: "noise" };
const WHAT = {
  floor: "best possible single deterministic reward: always the majority’s side",
  "constant ½": "½ for every pair",
  "soft BT as σ(Δr)": "one reward model, fitted to shares, read as a probability",
  "soft BT, tempered": "the same with a fitted temperature",
  "hard BT": "one reward model, fitted to majorities: the usual method",
  "{r, −r}": "one reward model and its negative",
  bootstrap: "reward models fitted to resampled votes",
  "mean–variance": "one reward model that predicts a mean and a variance",
  "mixture of BT": "reward models read as probabilities, fitted jointly",
  "ensemble: votes": "the weight of the members that vote for an answer, and half of the undecided share",
  "ensemble: policies": "the same members, each read as a policy",
};
const KINDS = { ahead: "good", behind: "behind", level: "level", unknown: "level" };
const EXPLAINED =
  "The Brier score is the mean squared difference between predicted and observed shares; lower is better. With few " +
  "votes per pair, even the true shares do not score 0. This part is the noise; the corrected score excludes it.";
const CROSS_VALIDATED =
  "Cross-validated: each prompt is predicted by an ensemble that was fitted without it. Groups, member cards and the " +
  "scores by number of members use the prompts that were held out from this ensemble.";

/** The main figure, the verdict and the next step of an evaluation. */
function headline({ main, verdict, standing: place, next_step: next }) {
  return el(
    "div",
    { class: `verdict headline ${KINDS[place]}` },
    el("p", { class: "main" }, data(main)),
    el("p", {}, data(verdict)),
    el("p", { class: "muted" }, data(`Next: ${next}`)),
  );
}

export function calibration(panel, ensemble) {
  const { reliability, history, individuals, tables, worst_group: worst } = ensemble;
  const redraws = [];
  panel.append(el("h2", {}, "Are the predictions calibrated?"));
  if (ensemble.headline) panel.append(headline(ensemble.headline));
  if (ensemble.left_out) panel.append(note(ensemble.left_out));
  if (ensemble.cross_validated) panel.append(note(CROSS_VALIDATED));
  if (!reliability.length && !history) {
    panel.append(note("No data: this ensemble was fitted without held-out votes."));
    return {};
  }
  panel.append(note(EXPLAINED));
  const heading = el("h3", { "aria-live": "polite" });
  const behind = el("div");
  const figures = el("div", { class: "side" });
  panel.append(figures);
  if (history) figures.append(historyFigure());
  if (reliability.length) {
    figures.prepend(curveFigure());
    panel.append(el("div", { class: "behind" }, heading, behind));
  }
  panel.append(...tables.map(textTable));
  if (worst) panel.append(el("p", {}, data(worst)));
  if (individuals) panel.append(...representation(individuals));
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.round(figures.clientWidth);
    if (width && width !== drawn) {
      drawn = width;
      redraws.forEach((redraw) => redraw());
    }
  }).observe(figures);
  let chosen = furthest(reliability);
  let pinned = false;
  if (reliability.length) showPairs();
  return {
    show(detail) {
      if (detail !== undefined && reliability[Number(detail)]) choose(Number(detail));
    },
  };

  // --- reliability curve

  function curveFigure() {
    const place = el("div");
    const spread = reliability.some((one) => hasEnds(one.interval));
    const rows = reliability.map(({ predicted, observed, interval, count: pairs }) => {
      return [number(predicted, 3), number(observed, 3), ...(spread ? [between(interval, 3)] : []), count(pairs)];
    });
    redraws.push(() => {
      const focused = place.contains(document.activeElement);
      clear(place, curve(place.clientWidth));
      if (focused) place.querySelector(".chosen").focus();
    });
    return el(
      "figure",
      {},
      el("h3", {}, "Predicted and observed shares"),
      place,
      el(
        "figcaption",
        {},
        "Each point is a group of pairs with similar predictions. On the dashed line predictions equal observations",
        spread && "; bars are 95 % intervals over prompts",
        ". Select a point to see some of its pairs.",
      ),
      asTable(["predicted", "observed", ...(spread ? ["95 %"] : []), "pairs"], rows),
    );
  }

  function curve(width) {
    const size = Math.min(width, 460);
    const at = scales(size, size * 0.86, [0, 1], [0, 1], { left: 48, right: 12, top: 30, bottom: 42, inset: 0 });
    const points = reliability.map((one, i) => {
      const [x, y] = [at.x(one.predicted), at.y(one.observed)];
      const spread = hasEnds(one.interval);
      return svg(
        "g",
        {
          class: `point${i === chosen ? " chosen" : ""}`,
          role: "button",
          "aria-label": `Predicted ${percent(one.predicted)}, observed ${percent(one.observed)}, ${pairsOf(one)}`,
          on: { click: () => pin(i), mouseenter: () => pinned || choose(i), focus: () => choose(i) },
        },
        svg("circle", { class: "halo", cx: x, cy: y, r: 13 }),
        spread && line("whisker", x, at.y(one.interval.low), x, at.y(one.interval.high)),
        svg("circle", { class: "dot", cx: x, cy: y, r: 5.5 }),
      );
    });
    roving(points);
    points.forEach((point, i) => point.setAttribute("tabindex", i === chosen ? "0" : "-1"));
    const ticks = [0, 0.25, 0.5, 0.75, 1];
    return svg(
      "svg",
      { ...frame(at, width), role: "group", "aria-label": "Observed against predicted shares" },
      axes(at, ticks, ticks, percent, percent, "predicted share preferring A", "observed share"),
      line("diagonal", at.x(0), at.y(0), at.x(1), at.y(1)),
      polyline(reliability.map((one) => [at.x(one.predicted), at.y(one.observed)])),
      points,
    );
  }

  /** A clicked point stays selected when the pointer moves; a second click releases it. */
  function pin(i) {
    pinned = !(pinned && chosen === i);
    choose(i);
  }

  function choose(i) {
    if (i === chosen) return;
    chosen = i;
    figures.querySelectorAll(".point").forEach((point, j) => point.classList.toggle("chosen", j === i));
    showPairs();
  }

  function showPairs() {
    const one = reliability[chosen];
    const many = one.pairs.length;
    const sample = many
      ? `Random sample of ${many} of its ${pairsOf(one)}.`
      : `It has ${pairsOf(one)}; their texts are not stored with this ensemble.`;
    heading.textContent = `Selected point: predicted ${percent(one.predicted)}, observed ${percent(one.observed)}`;
    clear(
      behind,
      el("p", { class: "muted" }, sample),
      el("div", { class: "pairs" }, one.pairs.map(pairCard)),
    );
  }

  // --- Brier score against k

  function historyFigure() {
    const place = el("div");
    redraws.push(() => clear(place, sizes(place.clientWidth)));
    const rows = history.points.map(({ k, test_brier: brier, test_brier_corrected: corrected }) => {
      return [plural(k, "member", "members"), number(brier), number(corrected)];
    });
    for (const [key, name] of Object.entries(LINES)) {
      if (key in history.lines) rows.push([name, number(history.lines[key]), ""]);
    }
    return el(
      "figure",
      {},
      el("h3", {}, "Brier score by number of members"),
      place,
      el(
        "figcaption",
        {},
        "Held-out Brier score of ensembles of each size. ",
        "floor" in history.lines && "Floor: the best possible score of a single deterministic reward. ",
        "Soft BT: one reward model read as a probability. Noise: the score of the true shares.",
      ),
      asTable(["", "Brier", "corrected"], rows),
    );
  }

  function sizes(width) {
    const lines = Object.keys(LINES).filter((key) => key in history.lines);
    const most = Math.max(...history.points.map((one) => one.test_brier), ...Object.values(history.lines));
    const largest = Math.max(...history.points.map((one) => one.k));
    const step = [0.01, 0.02, 0.05, 0.1].find((one) => most / one <= 6) ?? 0.2;
    const ticks = Array.from({ length: Math.floor((most * 1.08) / step) + 1 }, (_, i) => i * step);
    const margins = { left: 44, right: 130, top: 30, bottom: 42, inset: 10 };
    const at = scales(width, Math.min(width * 0.72, 396), [1, Math.max(largest, 2)], [0, most * 1.08], margins);
    const [first, last] = [history.points[0], history.points.at(-1)];
    const spoken = `Brier score ${number(first.test_brier)} with ${first.k}, ${number(last.test_brier)} with ${last.k} members`;
    const ks = history.points.map((one) => one.k);
    const labels = spaced([
      ...lines.map((key) => ({ y: at.y(history.lines[key]), class: key, text: `${LINES[key]} ${number(history.lines[key])}` })),
      { y: at.y(last.test_brier), class: "own", text: `ensemble ${number(last.test_brier)}` },
    ]);
    return svg(
      "svg",
      { ...frame(at, width), role: "img", "aria-label": spoken },
      "floor" in history.lines && band(at, at.y(history.lines.floor)),
      axes(at, ks, ticks, String, (value) => number(value, 2), "members", "Brier score"),
      lines.map((key) => line(`mark ${key}`, at.left, at.y(history.lines[key]), at.right, at.y(history.lines[key]))),
      polyline(history.points.map((one) => [at.x(one.k), at.y(one.test_brier)])),
      history.points.map((one) => svg("circle", { class: "dot", cx: at.x(one.k), cy: at.y(one.test_brier), r: 5 })),
      labels.map((label) => svg("text", { class: label.class, x: at.right + 8, y: label.y + 4 }, label.text)),
    );
  }
}

const pairsOf = (one) => plural(one.count, "pair", "pairs");

/** The point furthest from the diagonal, with the largest error. */
function furthest(points) {
  const gap = (one) => Math.abs(one.predicted - one.observed);
  return points.reduce((best, one, i) => (gap(one) > gap(points[best]) ? i : best), 0);
}

function pairCard(pair) {
  const people = pair.votes_a + pair.votes_b;
  return el(
    "article",
    { class: "card pair" },
    el("p", {}, el("b", {}, data(pair.prompt))),
    versus(
      `A · predicted ${percent(pair.prob_hat)}, chosen by ${pair.votes_a} of ${people}`,
      pair.response_a,
      `B · predicted ${percent(1 - pair.prob_hat)}, chosen by ${pair.votes_b} of ${people}`,
      pair.response_b,
    ),
  );
}

// --- drawing: scales, axes, lines and labels that both figures share

function scales(width, height, [x0, x1], [y0, y1], { left, right, top, bottom, inset }) {
  const at = { width, height, left, right: width - right, top, bottom: height - bottom, inset };
  at.x = (value) => at.left + at.inset + ((value - x0) / (x1 - x0)) * (at.right - at.left - 2 * at.inset);
  at.y = (value) => at.bottom - ((value - y0) / (y1 - y0)) * (at.bottom - at.top);
  return at;
}

const frame = (at, width) => ({ viewBox: `0 0 ${width} ${at.height}`, height: at.height });
const line = (look, x1, y1, x2, y2) => svg("line", { class: look, x1, y1, x2, y2 });
const polyline = (points, look = "") => svg("polyline", { class: `curve ${look}`, points: points.join(" ") });
const band = (at, y) =>
  svg("rect", { class: "band", x: at.left, y, width: at.right - at.left, height: at.bottom - y });

function axes(at, xs, ys, xText, yText, xTitle, yTitle) {
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
function spaced(labels) {
  const sorted = labels.sort((one, two) => one.y - two.y);
  for (let i = 1; i < sorted.length; i += 1) sorted[i].y = Math.max(sorted[i].y, sorted[i - 1].y + LABEL_GAP);
  return sorted;
}

// --- tables

const row = (cells, attributes = {}) =>
  el("tr", attributes, cells.map((cell, i) => (i ? el("td", {}, cell) : el("th", { scope: "row" }, cell))));

function table(heads, bodies, label) {
  const head = el("thead", {}, el("tr", {}, heads.map((title) => el("th", { scope: "col" }, title))));
  return scrollRegion(label, el("table", {}, head, bodies));
}

function asTable(heads, rows) {
  const body = el("tbody", {}, rows.map((cells) => row(cells)));
  return el("details", {}, el("summary", {}, "Show as table"), table(heads, body, "Table of the figure"));
}

function explained(name) {
  const words = WHAT[name.replace("→ ", "")];
  return words && el("small", { class: "muted" }, words);
}

function textTable({ title, columns, rows, note: text, main, warned }) {
  const look = (i) => (i === main ? "own" : warned.includes(i) ? "worst" : "");
  const named = ([name, ...others]) => [[data(name), explained(name)], ...others];
  const body = el("tbody", {}, rows.map((cells, i) => row(named(cells), { class: look(i) })));
  return el("div", {}, el("h3", {}, title), table(columns, body, title), note(text));
}

/** How well individuals are represented: a rater's other votes, by the number of the rater's choices. */
const representation = ({ verdicts, tables, notes }) => [
  el("h2", {}, "How well individuals are represented"),
  el("p", {}, "Each rater’s votes are predicted from some of the same rater’s choices on other prompts."),
  ...verdicts.map(({ kind, text }) => el("p", { class: `verdict ${kind}` }, text)),
  ...tables.map(textTable),
  note(notes.join(" ")),
];
