// Ask: one question, answered in one of three modes.

import { call } from "./api.js";
import { alertLine, attempt, button, clear, data, el, longText, memberName, memberRow, meter, note } from "./dom.js";
import { percent, plural, sized } from "./dom.js";
import { slate, UNLIKE } from "./slate.js";

const EXAMPLES_FIRST = 4;
const LARGEST_SLATE = 8;
const SMALLEST_SHOWN = 0.005; // probability of a member
const VISIBLE = 120; // pixels of the answer that must be visible
const PRESS_ASK = "Press Ask to let the language model write answers.";
const MODES = {
  balanced: ["Slate", "Answers that contain the favourites of most people, and one consensus answer."],
  steerable: ["Steered", "Choose between pairs of answers; the answer is the one you would most likely choose."],
  distributional: ["Random member", "Drawn with probability equal to its weight."],
};
const RULES = {
  borda: "Borda: most support on average",
  maximin: "Maximin: most support against the strongest rival",
  schulze: "Schulze: unbeaten in pairwise comparisons",
  lottery: "Maximal lottery: random draw",
};

export function ask(panel, ensemble) {
  const { k, weights, members: cards, examples, steering_pairs: pairs } = ensemble;
  const names = cards.map((card) => card.name);
  const state = {
    mode: "balanced",
    example: null, // its index; null for the user's own question
    generated: null, // the question and the answers that a language model wrote for it
    choices: [], // the user's choices so far
    pair: 0, // index of the next pair to choose on
    preference: null, // a member or words to steer by instead of choices
    steering: null, // the member that the last answer was steered to
    seed: 0,
    draws: [], // members drawn so far
    run: 0, // number of the latest request; results of older ones are dropped
  };
  const alert = alertLine();
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
  const size = el(
    "select",
    { id: "slate-size" },
    el("option", { value: "" }, "2 or 3"),
    Array.from({ length: LARGEST_SLATE }, (_, i) => el("option", { value: i + 1 }, String(i + 1))),
  );
  const sizeLabel = el("label", { for: "slate-size" }, "Answers on the slate");
  const ruleLabel = el("label", { for: "rule" }, "Consensus rule");
  const ruleRow = el("div", { class: "row small" }, sizeLabel, size, ruleLabel, rule);
  const waiting = el("p", { class: "muted", hidden: true });
  const form = el(
    "form",
    { class: "asking", novalidate: true },
    el("div", {}, el("label", { for: "prompt" }, "Question"), prompt),
    given,
    modeSwitch(),
    el("div", { class: "row" }, el("button", { class: "primary", type: "submit" }, "Ask"), ruleRow),
  );
  panel.append(el("h2", {}, "Ask a question"), exampleList(), form, alert, waiting, status, results);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    state.generated = null;
    scrolled(run);
  });
  prompt.addEventListener("input", () => {
    if (state.example !== null) choose(null);
  });
  rule.addEventListener("change", update);
  size.addEventListener("change", update);

  // --- the question and its candidates

  function exampleList() {
    if (!examples.length) return el("p", {}, "Write a question and the answers to choose from.");
    const items = examples.map((example, i) => {
      const choice = button(data(example.prompt), () => take(i));
      choice.dataset.example = i;
      return el("li", { hidden: i >= EXAMPLES_FIRST }, choice);
    });
    const more = button("More questions", showAll, "plain small");
    function showAll() {
      items.forEach((item) => (item.hidden = false));
      items[EXAMPLES_FIRST].querySelector("button").focus();
      more.remove();
    }
    return el(
      "div",
      {},
      el("p", {}, "Select a held-out question with the answers that people voted on, or write your own."),
      el("ul", { class: "examples", "aria-label": "Example questions" }, items),
      examples.length > EXAMPLES_FIRST && more,
    );
  }

  function take(i) {
    choose(i);
    scrolled(update);
  }

  /** Select an example, or with null the user's own question. */
  function choose(i) {
    state.example = i;
    state.draws = [];
    for (const button of panel.querySelectorAll("[data-example]"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.example) === i));
    if (i !== null) {
      prompt.value = examples[i].prompt;
      const list = el("ol", { class: "small" }, examples[i].responses.map((text) => el("li", {}, longText(text))));
      const title = plural(examples[i].responses.length, "candidate answer", "candidate answers");
      clear(given, el("details", {}, el("summary", {}, title), list));
    } else clear(given, ownAnswers());
  }

  function ownAnswers() {
    pasted.setAttribute("aria-describedby", "candidates-hint");
    const hint = ensemble.policies.length
      ? "Leave this empty to let each member answer with its own policy."
      : ensemble.can_generate
      ? "Leave this empty to let the language model of this server write answers."
      : "This server has no language model to write answers; paste some here.";
    return el(
      "div",
      {},
      el("label", { for: "candidates" }, "Candidate answers"),
      el("p", { class: "muted small", id: "candidates-hint" }, hint, " Separate them by blank lines, or one per line."),
      pasted,
    );
  }

  function candidates() {
    if (state.example !== null) return examples[state.example].responses;
    const text = pasted.value.replaceAll("\r", "").trim();
    if (!text && state.generated?.question === prompt.value.trim()) return state.generated.texts;
    const parts = text.split(/\n\s*\n/);
    return (parts.length > 1 ? parts : text.split("\n")).map((part) => part.trim()).filter(Boolean);
  }

  const hasCandidates = () => Boolean(prompt.value.trim() && candidates().length);
  const canGenerate = () => Boolean(prompt.value.trim() && ensemble.can_generate);

  function modeSwitch() {
    const options = Object.entries(MODES).map(([mode, [title, words]]) => {
      const input = el("input", { type: "radio", name: "mode", value: mode, checked: mode === state.mode });
      input.addEventListener("change", () => {
        state.mode = mode;
        ruleRow.hidden = mode !== "balanced";
        scrolled(update);
      });
      return el("label", {}, input, el("b", {}, title), el("span", { class: "muted small" }, words));
    });
    return el("fieldset", {}, el("legend", {}, "Mode"), el("div", { class: "modes" }, options));
  }

  // --- requests

  /** Do some work, and scroll to the results if they are below the edge of the window. */
  async function scrolled(work) {
    await work();
    if (results.getBoundingClientRect().top > innerHeight - VISIBLE) results.scrollIntoView({ block: "start" });
  }

  /** Answer again after a change. The language model may cost money, so only the button Ask queries it. */
  async function update() {
    if (hasCandidates()) return run();
    const mine = ++state.run;
    alert.hidden = true;
    if (state.mode !== "steerable") {
      clear(results, canGenerate() && note(PRESS_ASK));
      return;
    }
    // without candidates, only the posterior is updated
    const choices = recent();
    const steering = choices.length && (await attempt(panel, alert, () => call("v1/steer", { choices })));
    if (mine !== state.run) return;
    const chosen = choices.length > 0 || state.preference;
    clear(results, steeringPanel(steering || null), chosen && canGenerate() && note(PRESS_ASK));
  }

  async function run() {
    const mine = ++state.run;
    const question = prompt.value.trim();
    const texts = candidates();
    if (state.mode === "steerable" && !state.preference && !state.choices.length) {
      alert.hidden = true;
      clear(results, steeringView(null));
      return;
    }
    if (!hasCandidates() && !canGenerate()) {
      alert.textContent = question
        ? "Paste candidate answers, or select one of the questions above."
        : "Write a question, or select one above.";
      alert.hidden = false;
      clearAnswer();
      return;
    }
    const body = { prompt: question, mode: state.mode, ...(texts.length ? { candidates: texts } : {}) };
    if (state.mode === "balanced") {
      body.rule = rule.value;
      if (size.value) body.slate_size = Number(size.value);
    }
    if (state.mode === "distributional") body.seed = state.seed++;
    if (state.mode === "steerable") Object.assign(body, state.preference ?? { choices: recent() });
    const ask = () => attempt(panel, alert, () => call("v1/answer", body));
    const result = await (texts.length ? ask() : written(ask));
    if (mine !== state.run) return;
    if (!result) {
      clearAnswer();
      return;
    }
    // Answers of policies are not candidates for others: every question goes to the policies again.
    if (!texts.length && !ensemble.policies.length) state.generated = { question, texts: result.texts };
    state.steering = result.steering;
    const draw = { balanced, steerable: steeringView, distributional }[state.mode];
    clear(results, result.refused ? refusal(result) : draw(result), notes(result));
    status.textContent = summary(result);
  }

  /** Show that the language model is writing, and for how long. */
  async function written(ask) {
    const start = Date.now();
    const tell = () => (waiting.textContent = `The language model is writing\u2026 ${Math.round((Date.now() - start) / 1000)} s`);
    tell();
    waiting.hidden = false;
    const clock = setInterval(tell, 1000);
    try {
      return await ask();
    } finally {
      clearInterval(clock);
      waiting.hidden = true;
    }
  }

  /** Remove the answer to an earlier request; the pairs to choose from stay. */
  function clearAnswer() {
    status.textContent = "";
    clear(results, state.mode === "steerable" && steeringPanel(state.steering));
  }

  /** The text that screen readers announce when an answer arrives. */
  function summary({ answers }) {
    const [first] = answers;
    if (state.mode !== "balanced") return first.member === null ? "Answered." : `Member ${first.member} answers.`;
    const share = first.share === null ? "." : `; the first is the favourite of ${percent(first.share)} of people (predicted).`;
    return plural(answers.length, "answer", "answers") + share;
  }

  function notes({ notes: all = [], steering, unlike = {}, answers }) {
    const others = all.filter((one) => one !== steering?.note);
    const left = Object.entries(unlike).filter(([text]) => !answers.some((one) => one.text === text));
    const items = left.map(([text, reason]) => el("li", {}, data(text), `: ${reason}.`));
    return el(
      "div",
      { class: "small" },
      others.length > 0 && note(`Note: ${others.join("; ")}.`),
      items.length > 0 && el("details", {}, el("summary", {}, `${UNLIKE}: ${items.length}`), el("ul", {}, items)),
    );
  }

  const refusal = ({ answers: [one] }) =>
    el("article", { class: "card answer" }, el("h3", {}, "A refusal policy answered"), longText(one.text));

  // --- balanced

  const balanced = (result) => slate(result, names, ensemble.cannot_steer ? null : moreLike);

  /** The user prefers one answer of the slate to the others: one choice per other answer. */
  function moreLike(text, others) {
    const question = prompt.value.trim();
    for (const other of others)
      state.choices.push({ prompt: question, response_a: text, response_b: other.text, chosen: "a" });
    state.preference = null;
    panel.querySelector("input[value=steerable]").checked = true;
    state.mode = "steerable";
    ruleRow.hidden = true;
    scrolled(update);
  }

  // --- steerable

  function steeringView(result) {
    return el("div", {}, steeringPanel(result?.steering), result && steered(result));
  }

  const steeringPanel = (steering) =>
    ensemble.cannot_steer
      ? el("div", { class: "card" }, el("h3", {}, "One answer for everyone"), el("p", {}, sentence(ensemble.cannot_steer)), members())
      : el("div", { class: "steer" }, pairCard(), el("div", { class: "card" }, posteriorList(steering), otherWays()));

  const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

  /** The answer for the user: now, before the choices or words, and after the choice that would say most. */
  function steered({ answers: [one], steering: { before, ask, support, note: unchanged, why, member, path }, unlike = {} }) {
    if (state.preference?.member !== undefined || (before === null && !unlike[one.text]))
      return el(
        "article",
        { class: "card answer consensus" },
        el("h3", {}, `Member ${one.member} answers`),
        el("p", {}, memberName(one.member, names[one.member])),
        longText(one.text, 900),
      );
    const same = before === null || before === one.text;
    const decides = ask && !unchanged && [ask.answer_a, ask.answer_b].some((text) => text !== one.text);
    return el(
      "div",
      {},
      el(
        "article",
        { class: "card answer consensus" },
        el("h3", {}, same ? "The answer is the same as before" : "Your answer changed"),
        longText(one.text, 900),
        unlike[one.text] && note(`${UNLIKE}: ${unlike[one.text]}.`),
        note(data(unchanged ? sentence(unchanged) : path.length > 1 ? `Member ${member}: ${why}.` : sentence(why))),
        support !== null && note(`You are expected to prefer it to ${percent(support)} of the other candidates.`),
        !same && el("details", {}, el("summary", {}, "Answer before"), longText(before)),
      ),
      ask && !unchanged && !decides && note("No next choice between these candidates would change the answer."),
      decides && nextChoice(ask, one.text),
    );
  }

  function nextChoice(ask, now) {
    const side = (letter, text, then) =>
      el(
        "button",
        { type: "button", on: { click: () => pick(ask, letter, 0) } },
        el("b", {}, `Choose ${letter.toUpperCase()}`),
        data(text),
        el("span", { class: "muted small" }, then === now ? "The answer stays the same." : "The answer becomes: ", then !== now && data(then)),
      );
    const sides = [side("a", ask.response_a, ask.answer_a), side("b", ask.response_b, ask.answer_b)];
    return el("div", { class: "card" }, el("h3", {}, "This choice would decide"), el("div", { class: "duel" }, sides));
  }

  function pairCard() {
    const done = state.choices.length;
    const again = (done > 0 || state.preference) && button("Start over", restart, "plain small");
    const titled = (title, ...rest) => el("div", { class: "card" }, el("h3", {}, title), rest, again);
    if (!pairs.length) {
      const none = "This ensemble has no held-out pairs; select a member instead.";
      return titled("Which answer do you prefer?", el("p", {}, none));
    }
    if (state.pair >= pairs.length) {
      const made = `You made ${plural(done, "choice", "choices")}.`;
      const then = done ? " The answer below uses all of them." : "";
      return titled("No more pairs", el("p", {}, made, then));
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
      el("h3", {}, "Which answer do you prefer?"),
      note(`Pair ${state.pair + 1} of ${pairs.length}, from the held-out votes.`),
      el("p", {}, data(pair.prompt)),
      el("div", { class: "duel" }, side("a", pair.response_a), side("b", pair.response_b)),
      el("div", { class: "row" }, button("Skip this pair", () => pick(pair, null), "plain small"), again),
    );
  }

  /** The latest choices, as many as the server accepts. */
  const recent = () => state.choices.slice(-(ensemble.limits?.choices ?? state.choices.length));

  async function pick(pair, letter, step = 1) {
    state.pair += step;
    state.preference = null;
    if (letter) {
      const { prompt: question, response_a, response_b } = pair;
      state.choices.push({ prompt: question, response_a, response_b, chosen: letter });
    }
    await update();
    (results.querySelector("[data-choice]") ?? results.querySelector("button"))?.focus({ preventScroll: true });
  }

  function restart() {
    Object.assign(state, { choices: [], preference: null, steering: null, pair: 0 });
    update();
  }

  /** The posterior of each member; bars move from their values before the last choice. */
  function posteriorList(steering) {
    const posterior = steering?.posterior ?? weights;
    const choices = Math.max((steering?.path?.length ?? 0) - 1, 0);
    const before = choices ? steering.path.at(-2) : weights;
    const heading = el("h3", {}, "Which member matches you?");
    if (steering?.note) return el("div", {}, heading, el("p", {}, sentence(steering.note)));
    const items = posterior.map((share, j) => {
      const bar = meter(before[j], j);
      requestAnimationFrame(() => requestAnimationFrame(() => sized(bar.firstChild, share)));
      const shown = Math.max(share, before[j]) >= SMALLEST_SHOWN;
      return shown && memberRow(j, names[j], bar, percent(share), j === steering?.member);
    });
    const after = choices ? `, after ${plural(choices, "choice", "choices")}` : "";
    const when = steering
      ? `Probability that your preferences are those of each member${after}. ${percent(steering.average)}: of no member.`
      : "Weights of the members, before your first choice.";
    return el(
      "div",
      {},
      heading,
      note(when),
      el("ul", { class: "posterior" }, items),
    );
  }

  /** Select the answer of one member. */
  function members() {
    const options = names.map((name, j) => el("option", { value: j }, `${j} · ${name}`));
    const chooser = el("select", { id: "member" }, el("option", { value: "" }, "…"), options);
    chooser.addEventListener("change", () => chooser.value !== "" && steerBy({ member: Number(chooser.value) }));
    return el("p", {}, el("label", { for: "member" }, "Answer of one member"), el("br"), chooser);
  }

  function otherWays() {
    const words = el("input", { id: "like", placeholder: "protect nature and the climate first", autocomplete: "off" });
    const wordsForm = el("form", { class: "row" }, words, el("button", { type: "submit" }, "Match"));
    wordsForm.addEventListener("submit", (event) => {
      event.preventDefault();
      if (words.value.trim()) steerBy({ like: words.value.trim() });
    });
    return el(
      "details",
      {},
      el("summary", {}, "Other ways to steer"),
      members(),
      el("div", {}, el("label", { for: "like" }, "Preference in words"), wordsForm),
    );
  }

  function steerBy(preference) {
    state.preference = preference;
    update();
  }

  // --- distributional

  function distributional({ answers: [one], unlike = {} }) {
    state.draws.push(one.member);
    const n = state.draws.length;
    const counts = Array.from({ length: k }, (_, j) => state.draws.filter((drawn) => drawn === j).length);
    const top = Math.max(...weights, ...counts.map((drawn) => drawn / n));
    const rows = counts.map((drawn, j) => {
      const spoken = el("span", { class: "visually-hidden" }, ` of ${n}, weight ${percent(weights[j])}`);
      const bar = meter(drawn / n / top, j, weights[j] / top);
      return memberRow(j, names[j], bar, [String(drawn), spoken], j === one.member);
    });
    return el(
      "div",
      { class: "steer" },
      el(
        "article",
        { class: "card answer consensus" },
        el("h3", {}, `Member ${one.member} was drawn`),
        el("p", {}, memberName(one.member, names[one.member])),
        longText(one.text, 900),
        one.share !== null && note(`Predicted favourite of ${percent(one.share)} of people.`),
        unlike[one.text] && note(`${UNLIKE}: ${unlike[one.text]}.`),
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
        el("h3", {}, plural(n, "draw", "draws")),
        note("Number of draws of each member. The line marks the expected number, from its weight."),
        el("ul", { class: "posterior tally" }, rows),
      ),
    );
  }

  async function drawMore(n) {
    for (let i = 0; i < n && state.mode === "distributional" && alert.hidden; i += 1) await update();
    results.querySelector("button.primary")?.focus({ preventScroll: true });
  }

  // show an answer when the page opens
  choose(examples.length ? 0 : null);
  if (examples.length) run();
}
