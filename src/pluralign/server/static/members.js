// Members: how they differ, how differently they rank answers, and their disagreement with people.

import { badge, colour, count, data, el, memberName, memberRow, meter, note, number, percent, plural } from "./dom.js";
import { scrollRegion, versus } from "./dom.js";

const CHANCE = 0.5;
const STRONG = 0.95; // white text is more readable than black from this |τ| on

export function members(panel, ensemble) {
  const { members: cards, unnamed, tau, read } = ensemble;
  const sampled = read && read.prompts < read.of;
  const ranked = tau ? heatMap(tau, cards) : unknown("no held-out prompt has enough answers to rank");
  panel.append(
    el("h2", {}, "How the members differ"),
    el(
      "p",
      {},
      "Measured on held-out votes. Cards list only significant differences; of all claims together, 5\u00a0% may be false. ",
      "Phrases and views come from one half of the prompts and are tested on the other half. ",
      "Bars show how often a member prefers the trait if two answers differ in it; the line marks all members ",
      "together.",
      sampled && ` Traits, words and rankings use a random sample of ${count(read.prompts)} of the `,
      sampled && `${count(read.of)} prompts.`,
    ),
    unnamed && el("p", { class: "muted", id: "unnamed" }, unnamed),
    el("div", { class: "members" }, cards.map(card)),
    el(
      "div",
      { class: "side" },
      el("div", {}, el("h2", {}, "How differently the members rank answers"), ranked),
      el("div", {}, el("h2", {}, "Disagreement with people"), distances(cards)),
    ),
  );
  return {
    show(detail) {
      const chosen = document.getElementById(`member-${detail}`);
      for (const node of panel.querySelectorAll(".member")) node.classList.toggle("chosen", node === chosen);
      chosen?.scrollIntoView({ block: "start" });
      chosen?.focus({ preventScroll: true });
    },
  };
}

function unknown(why) {
  return el("p", { class: "muted" }, `No data: ${why}.`);
}

function card(one) {
  const weight = el("b", { class: "number" }, percent(one.weight));
  return el(
    "article",
    {
      class: `card member ${colour(one.member)}`,
      id: `member-${one.member}`,
      tabindex: "-1",
      "aria-label": `Member ${one.member}`,
    },
    el("header", {}, badge(one.member), el("h3", {}, data(one.name)), weight),
    one.written && written(one.written),
    one.leans.length > 0 && leans(one),
    words("Likes mentions of", one.likes),
    words("Dislikes mentions of", one.dislikes),
    one.far && el("p", { class: "flag" }, "Disagrees with people more than chance. Do not tune a policy to it."),
    folded(`Views it favours (${one.views.length})`, one.views.map(view)),
    folded("Details", one.description ? [el("p", { class: "small" }, data(one.description))] : [], ""),
    folded("Pairs where it disagrees with most members", one.distinguishing.map(minority)),
  );
}

const folded = (title, content, look = "examples-of") =>
  content.length > 0 && el("details", { class: look }, el("summary", {}, title), content);
const question = (prompt) => el("p", {}, el("b", {}, data(prompt)));

function written(one) {
  const named = el("p", {}, el("b", {}, data(one.name)), " – ", data(one.sentence));
  return el("div", { class: "written" }, named, el("p", { class: "small muted" }, data(one.evidence)));
}

function view(one) {
  const quotes = one.quotes.map((quote) =>
    el(
      "figure",
      { class: "quote" },
      el("blockquote", {}, data(quote.text)),
      el("figcaption", { class: "small muted" }, quote.preferred ? "Preferred" : "Rejected", " in answer to: ", data(quote.prompt)),
    ),
  );
  return el("div", { class: "example" }, el("p", {}, el("b", {}, data(one.title))), el("p", { class: "small" }, data(one.evidence)), quotes);
}

function minority(pair) {
  const people = `${percent(pair.people_with_it)} of ${plural(pair.votes, "person", "people")}`;
  const title = `Preferred, with ${percent(pair.weight_with_it)} of the weight and ${people}`;
  const responses = versus(title, pair.preferred, "Not preferred", pair.other);
  return el("div", { class: "example" }, question(pair.prompt), responses);
}

function leans(one) {
  const rows = one.leans.map((lean) => {
    const others = `all members ${percent(lean.share_of_all)}, people ${percent(lean.share_of_people)}`;
    const spoken = el("span", { class: "visually-hidden" }, ` of ${count(lean.pairs)} pairs, ${others}`);
    return el(
      "li",
      {},
      el("span", {}, `${lean.claim[0].toUpperCase()}${lean.claim.slice(1)}`),
      el("span", { class: "number" }, percent(lean.share), spoken),
      meter(lean.share, one.member, lean.share_of_all),
    );
  });
  return el("ul", { class: "leans" }, rows);
}

function words(title, list) {
  const chips = list.map((word) => el("li", {}, data(word)));
  return list.length > 0 && el("div", {}, note(title), el("ul", { class: "words" }, chips));
}

// --- Kendall's tau

function heatMap(diversity, cards) {
  const cell = (value, i, j) => {
    const label = `Members ${i} and ${j}: τ ${number(value, 2)}`;
    const made = el("td", { "aria-label": label }, number(value, 2).replace("0.", "."));
    const towards = value === null ? "var(--chip)" : value < 0 ? "var(--opposite)" : "var(--alike)";
    made.style.background = `color-mix(in srgb, ${towards} ${Math.round(100 * Math.abs(value ?? 0))}%, var(--even))`;
    made.classList.toggle("strong", Math.abs(value ?? 0) >= STRONG);
    return made;
  };
  const rows = diversity.tau.map((values, i) =>
    el("tr", {}, el("th", { scope: "row" }, badge(i)), values.map((value, j) => cell(value, i, j))),
  );
  const heads = el("tr", {}, el("td"), cards.map((one) => el("th", { scope: "col" }, badge(one.member))));
  const whole = el("table", { class: "heat" }, el("thead", {}, heads), el("tbody", {}, rows));
  return el(
    "div",
    {},
    el(
      "p",
      {},
      "Kendall’s τ is 1 if two members rank answers identically, 0 if their rankings are unrelated, and −1 if they ",
      `are reversed. Mean over all pairs of members: ${number(diversity.mean_off_diagonal, 2)}, `,
      `from ${plural(diversity.prompts, "prompt", "prompts")}.`,
    ),
    scrollRegion("Kendall’s τ between members", whole),
    el("p", { class: "scale" }, "reversed", el("i"), "identical"),
    mostDifferent(diversity.tau, cards),
  );
}

/** The two members that rank answers most differently, in words. */
function mostDifferent(tau, cards) {
  const pairs = tau.flatMap((values, i) => values.map((value, j) => ({ i, j, value })));
  const known = pairs.filter(({ i, j, value }) => i < j && value !== null);
  if (!known.length) return null;
  const { i, j, value } = known.reduce((lowest, one) => (one.value < lowest.value ? one : lowest));
  const [first, second] = [i, j].map((member) => memberName(member, cards[member].name));
  const differ = percent((1 - value) / 2);
  return el("p", { class: "pairing" }, first, " and ", second, ` order ${differ} of all pairs of answers differently.`);
}

// --- disagreement

function distances(cards) {
  if (cards.some((one) => one.disagreement === null)) return unknown("there are no held-out votes");
  const top = Math.max(CHANCE * 1.1, ...cards.map((one) => one.disagreement));
  const rows = cards.map((one) => {
    const bar = meter(one.disagreement / top, one.member, CHANCE / top);
    return memberRow(one.member, one.name, bar, percent(one.disagreement));
  });
  return el(
    "div",
    {},
    el(
      "p",
      {},
      "How often a member and a random person prefer different answers. The line marks 50\u00a0%, the level of chance. ",
      "Members that represent a minority have higher values. Do not tune a policy to a member above the line.",
    ),
    el("ul", { class: "posterior distances" }, rows),
  );
}
