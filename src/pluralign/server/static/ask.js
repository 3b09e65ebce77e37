// Ask: one question, three ways to answer it with members who disagree.

import { call } from "./api.js";
import { button, clear, data, el, guarded, longText, memberRow, meter, note, percent, plural } from "./dom.js";
import { sized, strip, troubleLine, who } from "./dom.js";

const EXAMPLES_FIRST = 4;
const SEEN = 120; // pixels of the answer that must be in sight
const MODES = {
  balanced: ["Everyone’s answers", "Each member’s favourite, and one that most can live with."],
  steerable: ["My kind of answer", "Show your taste by a few clicks; the member nearest to it answers."],
  distributional: ["One by lot", "A member is drawn in proportion to its weight, and answers."],
};
const RULES = {
  maximin: "strongest against its strongest rival (maximin)",
  borda: "preferred most often on average (Borda)",
  schulze: "unbeaten in a contest of all against all (Schulze)",
  lottery: "drawn from the maximal lottery",
};

export function ask(panel, ensemble) {
  const { k, weights, members: cards, examples, steering_pairs: pairs } = ensemble;
  const names = cards.map((card) => card.name);
  const state = {
    mode: "balanced",
    example: null, // its place in the list; null for a question of one's own
    written: null, // what a language model wrote for which question
    choices: [], // pairs that the user has chosen on …
    pair: 0, // … and which of those on offer is next
    taste: null, // a member or words to steer by instead
    seed: 0,
    draws: [], // the members drawn so far
    run: 0, // the latest request; older ones are not shown
  };
  const trouble = troubleLine();
  const status = el("p", { class: "visually-hidden", role: "status" });
  const results = el("div", { class: "results" });
  const prompt = el("textarea", { id: "prompt", rows: "1", required: true });
  const pasted = el("textarea", { id: "candidates", rows: "5" });
  const given = el("div");
  const rule = el(
    "select",
    { id: "rule" },
    Object.entries(RULES).map(([name, words]) => el("option", { value: name }, words)),
  );
  const ruleLabel = el("label", { for: "rule" }, "The answer for all is the one");
  const ruleRow = el("div", { class: "row small" }, ruleLabel, rule);
  const form = el(
    "form",
    { class: "asking", novalidate: true },
    el("div", {}, el("label", { for: "prompt" }, "The question"), prompt),
    given,
    modeSwitch(),
    el("div", { class: "row" }, el("button", { class: "primary", type: "submit" }, "Ask"), ruleRow),
  );
  panel.append(el("h2", {}, "Ask a question"), exampleList(), form, trouble, status, results);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    state.written = null;
    runInSight();
  });
  prompt.addEventListener("input", () => {
    if (state.example !== null) choose(null);
  });
  rule.addEventListener("change", run);
  // --- the question and its answers

  function exampleList() {
    if (!examples.length) return el("p", {}, "Write a question, and the answers that the members shall choose from.");
    const items = examples.map((example, i) => {
      const taking = button(data(example.prompt), () => take(i));
      taking.dataset.example = i;
      return el("li", { hidden: i >= EXAMPLES_FIRST }, taking);
    });
    const more = button("More of these questions", showAll, "plain small");
    function showAll() {
      items.forEach((item) => (item.hidden = false));
      items[EXAMPLES_FIRST].querySelector("button").focus();
      more.remove();
    }
    return el(
      "div",
      {},
      el("p", {}, "Take a question that people were asked, with the answers they voted on, or write your own."),
      el("ul", { class: "examples", "aria-label": "Questions to try" }, items),
      examples.length > EXAMPLES_FIRST && more,
    );
  }

  function take(i) {
    choose(i);
    runInSight();
  }

  /** Take an example, or with null the user's own question. */
  function choose(i) {
    state.example = i;
    state.draws = [];
    for (const button of panel.querySelectorAll("[data-example]"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.example) === i));
    if (i !== null) {
      prompt.value = examples[i].prompt;
      const list = el("ol", { class: "small" }, examples[i].responses.map((text) => el("li", {}, longText(text))));
      const from = `The ${plural(examples[i].responses.length, "answer", "answers")} they choose from`;
      clear(given, el("details", {}, el("summary", {}, from), list));
    } else clear(given, ownAnswers());
  }

  function ownAnswers() {
    pasted.setAttribute("aria-describedby", "candidates-hint");
    const hint = ensemble.can_generate
      ? "Leave this empty and the language model behind this server writes some."
      : "No language model is connected to this server, so it cannot write answers itself: paste a few here.";
    return el(
      "div",
      {},
      el("label", { for: "candidates" }, "Answers to choose from"),
      el("p", { class: "muted small", id: "candidates-hint" }, hint, " Put a blank line between them, or one a line."),
      pasted,
    );
  }

  function candidates() {
    if (state.example !== null) return examples[state.example].responses;
    const text = pasted.value.replaceAll("\r", "").trim();
    if (!text && state.written?.question === prompt.value.trim()) return state.written.texts;
    const parts = text.split(/\n\s*\n/);
    return (parts.length > 1 ? parts : text.split("\n")).map((part) => part.trim()).filter(Boolean);
  }

  const ready = () => Boolean(prompt.value.trim() && (candidates().length || ensemble.can_generate));

  function modeSwitch() {
    const options = Object.entries(MODES).map(([mode, [title, words]]) => {
      const input = el("input", { type: "radio", name: "mode", value: mode, checked: mode === state.mode });
      input.addEventListener("change", () => {
        state.mode = mode;
        ruleRow.hidden = mode !== "balanced";
        if (mode === "steerable" || ready()) runInSight();
        else clear(results);
      });
      return el("label", {}, input, el("b", {}, title), el("span", { class: "muted small" }, words));
    });
    return el("fieldset", {}, el("legend", {}, "Who answers"), el("div", { class: "modes" }, options));
  }

  // --- asking

  /** Run, and bring what it found into sight where that is below the edge of the window. */
  async function runInSight() {
    await run();
    if (results.getBoundingClientRect().top > innerHeight - SEEN) results.scrollIntoView({ block: "start" });
  }

  async function run() {
    const mine = ++state.run;
    const question = prompt.value.trim();
    const texts = candidates();
    if (state.mode === "steerable" && !state.taste && !state.choices.length) {
      trouble.hidden = true;
      clear(results, steering(null));
      return;
    }
    if (!ready()) {
      trouble.textContent = question
        ? "Paste the answers to choose from, or take one of the questions above."
        : "Write a question first, or take one of those above.";
      trouble.hidden = false;
      return;
    }
    const body = { prompt: question, mode: state.mode, ...(texts.length ? { candidates: texts } : {}) };
    if (state.mode === "balanced") body.rule = rule.value;
    if (state.mode === "distributional") body.seed = state.seed++;
    if (state.mode === "steerable") Object.assign(body, state.taste ?? { choices: recent() });
    const found = await guarded(panel, trouble, () => call("v1/answer", body));
    if (!found || mine !== state.run) return;
    if (!texts.length) state.written = { question, texts: found.candidate_texts };
    const draw = { balanced, steerable: steering, distributional }[state.mode];
    clear(results, found.refused ? refusal(found) : draw(found), notes(found));
    status.textContent = summary(found);
  }

  /** What a screen reader says when an answer is there. */
  function summary({ answers }) {
    const [first] = answers;
    if (state.mode !== "balanced") return first.member === null ? "Answered." : `Member ${first.member} answers.`;
    return `${plural(answers.length, "answer", "answers")}; the first has ${percent(first.weight)} of the weight.`;
  }

  const notes = (found) => found.notes?.length > 0 && note(`Note: ${found.notes.join("; ")}.`);

  const refusal = (found) =>
    el("article", { class: "card answer" }, el("h3", {}, "A refusal policy answered"), longText(found.answers[0].text));

  // --- balanced

  function balanced({ consensus, distilled, answers, candidates: n }) {
    const total = answers.reduce((sum, one) => sum + one.weight, 0);
    return el(
      "div",
      {},
      consensus && agreed(consensus),
      distilled && written(distilled),
      el("h2", {}, "What the members would say"),
      el(
        "p",
        { class: "muted" },
        answers.length === 1
          ? `All of the weight is behind the same one of ${n} answers.`
          : `Of ${n} answers, ${answers.length} are somebody’s favourite. The share is the weight behind each.`,
      ),
      el("div", { class: "slate" }, answers.map((one) => slateCard(one, answers, total))),
    );
  }

  function agreed(consensus) {
    return el(
      "article",
      { class: "card answer consensus" },
      el("h3", {}, "One answer for all"),
      longText(consensus.text, 900),
      note(
        `${percent(consensus.least_support)} of the weight prefers it to its strongest rival, `,
        `${percent(consensus.mean_support)} on average over all rivals; `,
        `it is the favourite of ${percent(consensus.favourite_of)}.`,
      ),
    );
  }

  const written = (distilled) =>
    el(
      "article",
      { class: "card answer" },
      el("h3", {}, distilled.used ? "Written from all of these" : "Written from all of these, but not used"),
      longText(distilled.text),
      note(
        `The best of ${distilled.drafts} drafts has ${percent(distilled.least_support)} of the weight against its `,
        `strongest rival; ${percent(distilled.to_reach)} was needed.`,
      ),
    );

  function slateCard(one, answers, total) {
    const others = answers.filter((other) => other !== one);
    return el(
      "article",
      { class: "card answer" },
      el(
        "header",
        {},
        el("span", { class: "share" }, percent(one.weight)),
        others.length > 0 && button("More like this", () => moreLike(one.text, others), "small"),
      ),
      strip(one.members, weights, total, `${percent(one.weight)} of the weight`),
      longText(one.text),
      voices(one.members),
    );
  }

  function voices(members) {
    const weight = (j) => el("span", { class: "muted" }, ` · ${percent(weights[j])}`);
    return el("ul", { class: "voices" }, members.map((j) => el("li", {}, who(j, names[j], weight(j)))));
  }

  /** The user likes one answer of the slate better than the others: that is so many choices. */
  function moreLike(text, others) {
    const question = prompt.value.trim();
    for (const other of others)
      state.choices.push({ prompt: question, response_a: text, response_b: other.text, chosen: "a" });
    state.taste = null;
    panel.querySelector("input[value=steerable]").checked = true;
    state.mode = "steerable";
    ruleRow.hidden = true;
    runInSight();
  }

  // --- steerable

  function steering(found) {
    return el("div", {}, steeringPanel(found?.steering), found && steered(found));
  }

  const steeringPanel = (told) =>
    el("div", { class: "steer" }, pairCard(), el("div", { class: "card" }, tasteList(told), otherWays()));

  function steered({ answers: [one], steering: told }) {
    return el(
      "article",
      { class: "card answer consensus" },
      el("h3", {}, `Member ${one.member} answers`),
      el("p", {}, who(one.member, names[one.member])),
      longText(one.text, 900),
      note(
        data(`Why this member: ${told.why}. `),
        `How sure that is: ${percent(told.sure)}. ${percent(one.weight)} of the weight has this as its favourite.`,
      ),
    );
  }

  function pairCard() {
    const done = state.choices.length;
    const again = (done > 0 || state.taste) && button("Start over", restart, "plain small");
    const titled = (title, ...rest) => el("div", { class: "card" }, el("h3", {}, title), rest, again);
    if (!pairs.length) {
      const none = "No held-out pairs are kept beside this ensemble; choose a member instead.";
      return titled("Which do you like better?", el("p", {}, none));
    }
    if (state.pair >= pairs.length) {
      const made = `You made ${plural(done, "choice", "choices")}.`;
      const then = done ? " The answer below is from the member nearest to your taste." : "";
      return titled("That was all of them", el("p", {}, made, then));
    }
    const pair = pairs[state.pair];
    const side = (letter, text) =>
      el(
        "button",
        { type: "button", "data-choice": letter, on: { click: () => pick(pair, letter) } },
        el("b", {}, `Choose ${letter.toUpperCase()}`),
        data(text),
      );
    return el(
      "div",
      { class: "card" },
      el("h3", {}, "Which do you like better?"),
      note(`Pair ${state.pair + 1} of ${pairs.length}, from votes the members have not seen.`),
      el("p", {}, data(pair.prompt)),
      el("div", { class: "duel" }, side("a", pair.response_a), side("b", pair.response_b)),
      el("div", { class: "row" }, button("Neither, next pair", () => pick(pair, null), "plain small"), again),
    );
  }

  /** As many choices as the server takes, the latest ones. */
  const recent = () => state.choices.slice(-(ensemble.limits?.choices ?? state.choices.length));

  async function pick(pair, letter) {
    state.pair += 1;
    state.taste = null;
    if (letter) {
      const { prompt: question, response_a, response_b } = pair;
      state.choices.push({ prompt: question, response_a, response_b, chosen: letter });
    }
    if (ready() || !state.choices.length) await run();
    else {
      // no question yet: only the taste moves
      const told = await guarded(panel, trouble, () => call("v1/steer", { choices: recent() }));
      if (told) clear(results, steeringPanel(told));
    }
    (results.querySelector("[data-choice]") ?? results.querySelector("button"))?.focus({ preventScroll: true });
  }

  function restart() {
    Object.assign(state, { choices: [], taste: null, pair: 0 });
    run();
  }

  /** The chance of each member, moving from where it was before the last choice. */
  function tasteList(told) {
    const posterior = told?.posterior ?? weights;
    const choices = Math.max((told?.path?.length ?? 0) - 1, 0);
    const before = choices ? told.path.at(-2) : weights;
    const items = posterior.map((share, j) => {
      const bar = meter(before[j], j);
      requestAnimationFrame(() => requestAnimationFrame(() => sized(bar.firstChild, share)));
      return memberRow(j, names[j], bar, percent(share), j === told?.member);
    });
    const when = choices ? `, after ${plural(choices, "choice", "choices")}` : told ? "" : ", before your first choice";
    return el(
      "div",
      {},
      el("h3", {}, "Whose taste is that?"),
      note(`The chance that you are of each member’s taste${when}.`),
      el("ul", { class: "posterior" }, items),
    );
  }

  function otherWays() {
    const options = names.map((name, j) => el("option", { value: j }, `${j} · ${name}`));
    const chooser = el("select", { id: "member" }, el("option", { value: "" }, "…"), options);
    chooser.addEventListener("change", () => chooser.value !== "" && steerBy({ member: Number(chooser.value) }));
    const words = el("input", { id: "like", placeholder: "short, warm, without lists", autocomplete: "off" });
    const say = el("form", { class: "row" }, words, el("button", { type: "submit" }, "Match"));
    say.addEventListener("submit", (event) => {
      event.preventDefault();
      if (words.value.trim()) steerBy({ like: words.value.trim() });
    });
    return el(
      "details",
      {},
      el("summary", {}, "Other ways to say it"),
      el("p", {}, el("label", { for: "member" }, "By member"), el("br"), chooser),
      el("div", {}, el("label", { for: "like" }, "In words"), say),
    );
  }

  function steerBy(taste) {
    state.taste = taste;
    run();
  }

  // --- distributional

  function distributional({ answers: [one] }) {
    state.draws.push(one.member);
    const n = state.draws.length;
    const counts = Array.from({ length: k }, (_, j) => state.draws.filter((drawn) => drawn === j).length);
    const top = Math.max(...weights, ...counts.map((drawn) => drawn / n));
    const rows = counts.map((drawn, j) => {
      const heard = el("span", { class: "visually-hidden" }, ` of ${n}, weight ${percent(weights[j])}`);
      const bar = meter(drawn / n / top, j, weights[j] / top);
      return memberRow(j, names[j], bar, [String(drawn), heard], j === one.member);
    });
    return el(
      "div",
      { class: "steer" },
      el(
        "article",
        { class: "card answer consensus" },
        el("h3", {}, `Member ${one.member} was drawn`),
        el("p", {}, who(one.member, names[one.member])),
        longText(one.text, 900),
        note(
          `Its weight is ${percent(weights[one.member])}; `,
          `${percent(one.weight)} of the weight has this answer as its favourite.`,
        ),
        el(
          "div",
          { class: "row" },
          button("Draw again", () => drawMore(1), "primary"),
          button("Draw ten", () => drawMore(10)),
        ),
      ),
      el(
        "div",
        { class: "card" },
        el("h3", {}, `${plural(n, "draw", "draws")} so far`),
        note("How often each member was drawn; the line marks its weight, where the bar settles in time."),
        el("ul", { class: "posterior tally" }, rows),
      ),
    );
  }

  async function drawMore(n) {
    for (let i = 0; i < n && state.mode === "distributional" && trouble.hidden; i += 1) await run();
    results.querySelector("button.primary")?.focus({ preventScroll: true });
  }

  // an answer is there before anything is asked
  choose(examples.length ? 0 : null);
  if (examples.length) run();
}
