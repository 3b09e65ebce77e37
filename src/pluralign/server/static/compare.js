// Compare: the members' votes on two responses, with reasons.

import { call } from "./api.js";
import { button, clear, colour, data, el, attempt, percent, plural, sized, alertLine, memberName } from "./dom.js";
import { UNLIKE } from "./slate.js";

export function compare(panel, ensemble) {
  const pairs = ensemble.steering_pairs;
  let next = 0;
  let known = null;
  let seen = false;
  const another = button("Another example", fill);
  const alert = alertLine();
  const status = el("p", { class: "visually-hidden", role: "status" });
  const results = el("div", { class: "results" });
  const fields = {
    prompt: el("textarea", { id: "compare-prompt", rows: "2" }),
    response_a: el("textarea", { id: "response-a", rows: "6" }),
    response_b: el("textarea", { id: "response-b", rows: "6" }),
  };
  const labelled = (field, label, wide) =>
    el("div", { class: wide ? "wide" : "" }, el("label", { for: field.id }, label), field);
  const form = el(
    "form",
    { class: "asking" },
    el(
      "div",
      { class: "fields" },
      labelled(fields.prompt, "Question", true),
      labelled(fields.response_a, "Response A"),
      labelled(fields.response_b, "Response B"),
    ),
    el(
      "div",
      { class: "row" },
      el("button", { class: "primary", type: "submit" }, "Compare"),
      pairs.length > 0 && another,
    ),
  );
  panel.append(
    el("h2", {}, "Compare two responses"),
    el("p", {}, "Paste a question and two answers. Every member votes, with reasons from its measured preferences."),
    form,
    alert,
    status,
    results,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  form.addEventListener("input", () => (known = null));

  function fill() {
    known = pairs[next];
    next = (next + 1) % pairs.length;
    for (const [name, field] of Object.entries(fields)) field.value = known[name];
    run();
  }

  async function run() {
    const body = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]));
    if (!body.response_a.trim() || !body.response_b.trim()) {
      alert.textContent = "Paste two responses, or use an example.";
      alert.hidden = false;
      clear(results);
      return;
    }
    const shown = known;
    const result = await attempt(panel, alert, () => call("v1/explain", body));
    if (!result) {
      clear(results);
      return;
    }
    clear(results, outcome(result, shown));
    status.textContent = results.querySelector("h2").textContent;
  }

  function outcome({ members, prob_hat: hard, prob_policy: soft, unlike = {} }, pair) {
    if (hard === null) {
      const reasons = Object.entries(unlike).map(([side, why]) => el("li", {}, `Response ${side.toUpperCase()}: ${why}.`));
      return el("div", {}, el("h2", {}, "No share of people is stated"), el("p", {}, `${UNLIKE}:`), el("ul", {}, reasons));
    }
    const camps = { a: members.filter((one) => one.vote > 0.5), b: members.filter((one) => one.vote < 0.5) };
    const ties = members.filter((one) => one.vote === 0.5);
    const reading = ensemble.level === "policy" ? soft : hard;
    const { undecided } = ensemble;
    const own = camps.a.reduce((sum, one) => sum + one.weight, 0);
    const voters = `${plural(camps.a.length, "member", "members")} voting for A`;
    const counted = undecided
      ? `The ${voters} ${camps.a.length === 1 ? "has" : "have"} ${percent(own)} of the weight. The undecided share of ` +
        `${percent(undecided)} counts half for each side. `
      : `This is the weight of the ${voters}. `;
    const how =
      ensemble.level === "policy"
        ? `Each member counts with its probability of preferring A. With hard votes the share is ${percent(hard)}.`
        : counted +
          `With each member’s probability of preferring A instead of its vote, the share is ${percent(soft)}.`;
    const people = pair ? pair.votes_a + pair.votes_b : 0;
    const middle = undecided ? `, undecided ${percent(undecided)}` : "";
    const spoken = `A ${percent(hard)}, B ${percent(1 - hard)} of the weight${middle}`;
    const ends = [el("span", {}, `A ${percent(hard)}`), el("span", {}, `${percent(1 - hard)} B`)];
    const bar = [side(camps.a), side(ties), undecided > 0 && coin(undecided), side(camps.b)];
    return el(
      "div",
      {},
      el("h2", {}, `${percent(reading)} of people are predicted to prefer A`),
      el(
        "p",
        { class: "muted" },
        how,
        people > 0 && ` In the data ${pair.votes_a} of ${plural(people, "person", "people")} preferred A.`,
      ),
      el("div", { class: "verdict-bar" }, ends),
      el("div", { class: "split", role: "img", "aria-label": spoken }, bar),
      el(
        "div",
        { class: "camps" },
        camp("For A", camps.a, "No member votes for A."),
        camp("For B", camps.b, "No member votes for B."),
      ),
      ties.length > 0 && camp("Ties", ties, ""),
    );
  }

  function side(members) {
    const weight = members.reduce((sum, one) => sum + one.weight, 0);
    if (!weight) return null;
    const parts = members.map((one) =>
      sized(el("div", { class: colour(one.member) }, el("span", {}, String(one.member))), one.weight / weight),
    );
    return sized(el("div", { class: "strip" }, parts), weight * (1 - ensemble.undecided));
  }

  /** The undecided share, which is split evenly between both sides. */
  function coin(share) {
    return sized(el("div", { class: "undecided", title: `Undecided share ${percent(share)}` }, "½"), share);
  }

  function camp(title, members, none) {
    const ordered = [...members].sort((one, two) => two.weight - one.weight);
    return el(
      "section",
      { class: "camp" },
      el("h3", {}, title),
      ordered.length ? ordered.map(voter) : el("p", { class: "muted" }, none),
    );
  }

  function voter(one) {
    const probability = one.vote >= 0.5 ? one.prob_a : 1 - one.prob_a;
    return el(
      "article",
      { class: "card" },
      el("h3", {}, memberName(one.member, one.name)),
      el(
        "p",
        { class: "muted small" },
        `Weight ${percent(one.weight)}`,
        one.vote !== 0.5 && `; prefers this response with probability ${percent(probability)}`,
      ),
      el("ul", { class: "reasons" }, one.why.map((sentence) => el("li", {}, data(sentence)))),
      one.against?.length > 0 &&
        el(
          "details",
          {},
          el("summary", {}, "Reasons against"),
          el("ul", { class: "reasons against" }, one.against.map((sentence) => el("li", {}, data(sentence)))),
        ),
    );
  }

  return {
    show() {
      if (!seen && pairs.length) fill(); // the first time the tab opens
      seen = true;
    },
  };
}
