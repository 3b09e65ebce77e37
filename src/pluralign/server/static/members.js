// Members: what sets each apart, how differently they rank, how far each is from people.

import { badge, clear, colour, count, data, el, longText, memberRow, meter, note, number, percent } from "./dom.js";
import { plural, roving, signed, versus, who } from "./dom.js";

const COIN = 0.5;
const STRONG = 0.95; // from this |τ| on white ink is easier to read than black

export function members(panel, ensemble) {
  const { members: cards, tau, warnings, read } = ensemble;
  const sampled = read && read.prompts < read.of;
  const ranked = tau ? heatMap(tau, cards) : unknown("no held-out prompt has enough answers to rank");
  panel.append(
    el("h2", {}, "What sets each member apart"),
    el(
      "p",
      {},
      "Measured on votes the members have not seen. A card claims only what chance would hardly produce; where it ",
      "claims nothing, the member is close to the average of all. Bars say how often a member sides with that where ",
      "two answers differ in it; the line marks all members together.",
      sampled && ` What is said of traits, words and ranks is from ${count(read.prompts)} of the ${count(read.of)} `,
      sampled && "prompts, drawn by lot.",
    ),
    ...warnings.map((text) => el("p", { class: "verdict warn" }, data(text))),
    el("div", { class: "members" }, cards.map(card)),
    el(
      "div",
      { class: "side" },
      el("div", {}, el("h2", {}, "How differently they rank answers"), ranked),
      el("div", {}, el("h2", {}, "How far each is from people"), distances(cards)),
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
  return el("p", { class: "muted" }, `Nothing is known here: ${why}.`);
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
    one.leans.length > 0 && leans(one),
    words("Drawn to", one.likes),
    words("Turns from", one.dislikes),
    one.far && el("p", { class: "flag" }, "Further from people than a coin."),
    one.description && folded("In numbers", [el("p", { class: "small" }, data(one.description))], ""),
    one.distinguishing.length > 0 && folded("Where it stands nearly alone", one.distinguishing.map(alone)),
    one.typical.length > 0 && folded("What it likes most", one.typical.map(liked)),
  );
}

const folded = (title, content, look = "examples-of") =>
  el("details", { class: look }, el("summary", {}, title), content);
const asked = (prompt) => el("p", {}, el("b", {}, data(prompt)));
const liked = ({ prompt, response }) => el("div", { class: "example" }, asked(prompt), longText(response));

function alone(pair) {
  const people = `${percent(pair.people_with_it)} of ${plural(pair.votes, "person", "people")}`;
  const title = `It prefers this, with ${percent(pair.weight_with_it)} of the weight and ${people}`;
  return el("div", { class: "example" }, asked(pair.prompt), versus(title, pair.preferred, "to this", pair.other));
}

function leans(one) {
  const rows = one.leans.map((lean) => {
    const others = `all members ${percent(lean.share_of_all)}, people ${percent(lean.share_of_people)}`;
    const heard = el("span", { class: "visually-hidden" }, ` of ${count(lean.pairs)} pairs, ${others}`);
    return el(
      "li",
      {},
      el("span", {}, `${lean.claim[0].toUpperCase()}${lean.claim.slice(1)}`),
      el("span", { class: "number" }, percent(lean.share), heard),
      meter(lean.share, one.member, lean.share_of_all),
    );
  });
  return el("ul", { class: "leans" }, rows);
}

function words(title, list) {
  const chips = list.map((word) => el("li", {}, data(word)));
  return list.length > 0 && el("div", {}, note(`${title} the words`), el("ul", { class: "words" }, chips));
}

// --- Kendall's tau

function heatMap(found, cards) {
  const sentence = el("p", { class: "pairing", "aria-live": "polite" });
  const cells = [];
  const say = (i, j) => {
    cells.forEach((cell) => cell.classList.toggle("chosen", cell.dataset.at === `${i} ${j}`));
    clear(sentence, ...described(found, cards, i, j));
  };
  const rows = found.tau.map((values, i) =>
    el("tr", {}, el("th", { scope: "row" }, badge(i)), values.map((value, j) => cell(value, i, j))),
  );
  function cell(value, i, j) {
    const label = `Members ${i} and ${j}: τ ${number(value, 2)}`;
    const made = el("td", { "data-at": `${i} ${j}`, "aria-label": label }, number(value, 2).replace("0.", "."));
    paint(made, value);
    made.addEventListener("mouseenter", () => say(i, j));
    made.addEventListener("click", () => say(i, j));
    made.addEventListener("focus", () => say(i, j));
    cells.push(made);
    return made;
  }
  const attributes = { class: "heat", role: "grid", "aria-label": "Kendall’s τ between members" };
  const heads = el("tr", {}, el("td"), cards.map((one) => el("th", { scope: "col" }, badge(one.member))));
  roving(cells, undefined, cards.length);
  const furthest = extreme(found.tau);
  if (furthest) say(...furthest);
  return el(
    "div",
    {},
    el(
      "p",
      {},
      "τ is 1 where two members rank answers alike, 0 where their rankings have nothing to do with each other, −1 where ",
      `one is the other upside down. Mean between different members: ${signed(found.mean_off_diagonal, 2)}, `,
      `over ${plural(found.prompts, "prompt", "prompts")}.`,
    ),
    el("div", { class: "scroll" }, el("table", attributes, el("thead", {}, heads), el("tbody", {}, rows))),
    el("p", { class: "scale" }, "opposite", el("i"), "alike"),
    sentence,
  );
}

function extreme(tau) {
  let found = null;
  tau.forEach((row, i) =>
    row.forEach((value, j) => {
      if (i < j && value !== null && (!found || value < tau[found[0]][found[1]])) found = [i, j];
    }),
  );
  return found;
}

function paint(cell, value) {
  const towards = value === null ? "var(--chip)" : value < 0 ? "var(--opposite)" : "var(--alike)";
  const share = value === null ? 0 : Math.round(100 * Math.abs(value));
  cell.style.background = `color-mix(in srgb, ${towards} ${share}%, var(--even))`;
  cell.classList.toggle("strong", value !== null && Math.abs(value) >= STRONG);
}

function described(found, cards, i, j) {
  const value = found.tau[i][j];
  if (i === j) return [who(i, cards[i].name, " with itself.")];
  if (value === null) return [`Members ${i} and ${j}: not known, one of them tells no answers apart.`];
  const differ = percent((1 - value) / 2);
  const error = found.standard_error[i][j];
  const give = error === null ? "" : ` ± ${number(2 * error, 2)}`;
  return [
    who(i, cards[i].name),
    " and ",
    who(j, cards[j].name),
    ` order ${differ} of all pairs of answers differently (τ ${number(value, 2)}${give}).`,
  ];
}

// --- disagreement

function distances(cards) {
  if (cards.some((one) => one.disagreement === null)) return unknown("there are no held-out votes");
  const top = Math.max(COIN * 1.1, ...cards.map((one) => one.disagreement));
  const rows = cards.map((one) => {
    const bar = meter(one.disagreement / top, one.member, COIN / top);
    return memberRow(one.member, one.name, bar, percent(one.disagreement));
  });
  return el(
    "div",
    {},
    el(
      "p",
      {},
      "How often a member and a random person prefer different answers. The line marks 50 %, where a coin would be. ",
      "Members that stand for a minority are further out; beyond the line nobody should tune a policy to one.",
    ),
    el("ul", { class: "posterior distances" }, rows),
  );
}
