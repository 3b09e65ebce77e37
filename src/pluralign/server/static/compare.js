// Compare: two responses, who votes for which, and why.

import { call } from "./api.js";
import { button, clear, colour, data, el, guarded, percent, plural, sized, troubleLine, who } from "./dom.js";

export function compare(panel, ensemble) {
  const pairs = ensemble.steering_pairs;
  let next = 0;
  let known = null;
  let seen = false;
  const another = button("Another example", fill);
  const trouble = troubleLine();
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
      labelled(fields.prompt, "The question", true),
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
    el("p", {}, "Paste a question and two answers to it: every member votes, and its measured habits say why."),
    form,
    trouble,
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
      trouble.textContent = "Paste two responses first, or take an example.";
      trouble.hidden = false;
      return;
    }
    const asked = known;
    const found = await guarded(panel, trouble, () => call("v1/explain", body));
    if (!found) return;
    clear(results, outcome(found, asked));
    status.textContent = results.querySelector("h2").textContent;
  }

  function outcome({ members, prob_hat: hard, prob_policy: soft }, pair) {
    const camps = { a: members.filter((one) => one.vote > 0.5), b: members.filter((one) => one.vote < 0.5) };
    const torn = members.filter((one) => one.vote === 0.5);
    const reading = ensemble.level === "policy" ? soft : hard;
    const how =
      ensemble.level === "policy"
        ? `Votes count by how sure each member is; as plain votes they would say ${percent(hard)}.`
        : `That is the weight of the ${plural(camps.a.length, "member", "members")} voting for A; ` +
          `counted by how sure each member is, it would be ${percent(soft)}.`;
    const people = pair ? pair.votes_a + pair.votes_b : 0;
    const heard = `A ${percent(hard)}, B ${percent(1 - hard)} of the weight`;
    const ends = [el("span", {}, `A ${percent(hard)}`), el("span", {}, `${percent(1 - hard)} B`)];
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
      el("div", { class: "split", role: "img", "aria-label": heard }, side(camps.a), side(torn), side(camps.b)),
      el(
        "div",
        { class: "camps" },
        camp("For A", camps.a, "No member votes for A."),
        camp("For B", camps.b, "No member votes for B."),
      ),
      torn.length > 0 && camp("Undecided", torn, ""),
    );
  }

  function side(members) {
    const weight = members.reduce((sum, one) => sum + one.weight, 0);
    if (!weight) return null;
    const parts = members.map((one) =>
      sized(el("div", { class: colour(one.member) }, el("span", {}, String(one.member))), one.weight / weight),
    );
    return sized(el("div", { class: "strip" }, parts), weight);
  }

  function camp(title, members, none) {
    const ordered = [...members].sort((one, two) => two.weight - one.weight);
    return el(
      "section",
      { class: "camp" },
      el("h3", {}, title),
      ordered.length ? ordered.map(voice) : el("p", { class: "muted" }, none),
    );
  }

  function voice(one) {
    const sure = one.vote >= 0.5 ? one.prob_a : 1 - one.prob_a;
    return el(
      "article",
      { class: "card" },
      el("h3", {}, who(one.member, one.name)),
      el(
        "p",
        { class: "muted small" },
        `${percent(one.weight)} of the weight`,
        one.vote !== 0.5 && `, ${percent(sure)} sure`,
      ),
      el("ul", { class: "reasons" }, one.why.map((sentence) => el("li", {}, data(sentence)))),
      one.against?.length > 0 &&
        el(
          "details",
          {},
          el("summary", {}, "What speaks against it"),
          el("ul", { class: "reasons against" }, one.against.map((sentence) => el("li", {}, data(sentence)))),
        ),
    );
  }

  return {
    show() {
      if (!seen && pairs.length) fill(); // something to read when the tab is first opened
      seen = true;
    },
  };
}
