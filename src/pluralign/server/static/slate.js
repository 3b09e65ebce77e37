// The slate: answers with their predicted shares of people and the members behind them, and the consensus.

import { button, el, longText, memberName, note, percent, strip } from "./dom.js";

/**
 * The view of a balanced answer.
 *
 * `members` has the names and weights of all members; `moreLike(text, others)` is called for "More like this".
 */
export function slate({ consensus, distilled, answers, coverage, candidates: n, written = [] }, members, moreLike) {
  const total = answers.reduce((sum, one) => sum + one.weight, 0);
  return el(
    "div",
    {},
    consensus && consensusCard(consensus),
    distilled && statementCard(distilled),
    el("h2", {}, "Slate"),
    el(
      "p",
      { class: "muted" },
      (written.length
        ? "Each member's own policy wrote its answer. "
        : `${answers.length} of ${n} answers, with the favourite of ${percent(coverage)} of people (predicted). `) +
        "Percentages are the predicted shares of people whose favourite an answer is. " +
        "Bars show the weight of the members that prefer it to the rest of the slate.",
    ),
    el("div", { class: "slate" }, answers.map((one) => slateCard(one, answers, total, members, moreLike))),
  );
}

function consensusCard(consensus) {
  return el(
    "article",
    { class: "card answer consensus" },
    el("h3", {}, "Consensus"),
    consensus.note && el("p", {}, consensus.note),
    longText(consensus.text, 900),
    note(
      `Predicted: ${percent(consensus.least_support)} of people prefer it to its strongest rival; `,
      `average over all rivals: ${percent(consensus.mean_support)}. `,
      `Favourite of ${percent(consensus.favourite_of)} of people.`,
    ),
  );
}

const statementCard = (distilled) =>
  el(
    "article",
    { class: "card answer" },
    el("h3", {}, distilled.used ? "Generated statement" : "Generated statement (not used)"),
    longText(distilled.text),
    note(
      `Best of ${distilled.drafts} drafts. Predicted: ${percent(distilled.least_support)} of people prefer it to its `,
      `strongest rival; ${percent(distilled.to_reach)} is required.`,
    ),
  );

function slateCard(one, answers, total, { names, weights }, moreLike) {
  const others = answers.filter((other) => other !== one);
  return el(
    "article",
    { class: "card answer" },
    el(
      "header",
      {},
      el("span", { class: "share" }, percent(one.share ?? one.weight)),
      others.length > 0 && button("More like this", () => moreLike(one.text, others), "small"),
    ),
    strip(one.members, weights, total, `${percent(one.weight)} of the weight`),
    longText(one.text),
    memberList(one.members, names, weights),
  );
}

function memberList(members, names, weights) {
  const weight = (j) => el("span", { class: "muted" }, ` · ${percent(weights[j])}`);
  return el("ul", { class: "voices" }, members.map((j) => el("li", {}, memberName(j, names[j], weight(j)))));
}
