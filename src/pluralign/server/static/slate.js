// The slate: answers with their predicted shares of people and the members behind them, and the consensus.

import { button, el, longText, memberName, note, percent } from "./dom.js";

export const UNLIKE = "Unlike anything these people voted on";
const ALL = 0.9999; // of a slate with every candidate

/**
 * The view of a balanced answer: one number per card, the predicted share of people.
 *
 * `names` are those of all members; `moreLike(text, others)`, if given, is called for "More like this".
 */
export function slate({ consensus, distilled, answers, coverage, candidates: n, written = [], unlike = {} }, names, moreLike) {
  const covered = coverage === null || coverage > ALL ? "" : `, with the favourite of ${percent(coverage)} of people (predicted)`;
  const selected = written.length ? "Each member's own policy wrote its answer. " : `${answers.length} of ${n} answers${covered}. `;
  const shares = coverage === null ? "" : "Percentages are the predicted shares of people whose favourite an answer is.";
  return el(
    "div",
    {},
    consensus && consensusCard(consensus),
    distilled && statementCard(distilled),
    el("h2", {}, "Slate"),
    el("p", { class: "muted" }, selected, shares),
    el("div", { class: "slate" }, answers.map((one) => slateCard(one, answers, names, unlike[one.text], moreLike))),
  );
}

const consensusCard = (consensus) =>
  el(
    "article",
    { class: "card answer consensus" },
    el("h3", {}, "Consensus"),
    consensus.note && el("p", {}, consensus.note),
    longText(consensus.text, 900),
    supported(consensus),
  );

const supported = ({ least_support: share }) =>
  share !== null && note(`Predicted: ${percent(share)} of people prefer it to its strongest rival.`);

const statementCard = (distilled) =>
  el(
    "article",
    { class: "card answer" },
    el("h3", {}, distilled.used ? "Generated statement" : "Generated statement (not used)"),
    longText(distilled.text),
    distilled.refused ? note(`${UNLIKE}: ${distilled.refused}.`) : supported(distilled),
  );

function slateCard(one, answers, names, reason, moreLike) {
  const others = answers.filter((other) => other !== one);
  return el(
    "article",
    { class: "card answer" },
    el(
      "header",
      {},
      one.share !== null && el("span", { class: "share" }, percent(one.share)),
      moreLike && others.length > 0 && button("More like this", () => moreLike(one.text, others), "small"),
    ),
    longText(one.text),
    reason && note(`${UNLIKE}: ${reason}.`),
    el("ul", { class: "voices" }, one.members.map((j) => el("li", {}, memberName(j, names[j])))),
  );
}
