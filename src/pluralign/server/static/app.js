// The page of `pluralign serve`: an introduction, and four tabs.

import { call, onKeyNeeded } from "./api.js";
import { ask } from "./ask.js";
import { calibration } from "./calibration.js";
import { compare } from "./compare.js";
import { clear, colour, count, data, el, percent, plural, printable, roving, sized } from "./dom.js";
import { members } from "./members.js";

const VIEWS = { ask, calibration, members, compare };
const at = (id) => document.getElementById(id);

onKeyNeeded(
  (rejected) =>
    new Promise((resolve) => {
      const form = at("key");
      const field = at("key-field");
      form.hidden = false;
      form.querySelector("label").textContent = rejected
        ? "This key was rejected. Enter another one."
        : "This server requires an API key.";
      field.value = "";
      field.focus();
      form.onsubmit = (event) => {
        event.preventDefault();
        form.hidden = true;
        resolve(field.value.trim());
      };
    }),
);

try {
  start(await call("v1/ensemble"));
} catch (error) {
  at("lead").hidden = true;
  at("alert").textContent = printable(error.message);
  at("alert").hidden = false;
}

function start(ensemble) {
  document.title = `${ensemble.name} · Pluralign`;
  clear(at("name"), data(ensemble.name));
  at("lead").textContent = printable(introduction(ensemble));
  if (ensemble.insight) clear(at("insight"), insight(ensemble.insight));
  const shown = {};
  for (const [name, view] of Object.entries(VIEWS)) shown[name] = view(at(name), ensemble) ?? {};
  tabs(shown);
}

function introduction({ k, data: source, votes, undecided_note: undecided, cross_validated: crossValidated }) {
  const share = undecided
    ? "their weighted votes and half of the undecided share predict the share of people who prefer an answer."
    : "the weight of the votes for an answer is the predicted share of people who prefer it.";
  const trained = source.train_pairs ? ` Trained on ${count(source.train_pairs)} pairs of answers with votes` : "";
  const pairs = votes ? `; tested on ${count(votes.pairs)} pairs from held-out prompts` : "";
  const tested = crossValidated ? "; cross-validated" : pairs;
  return (
    `${plural(k, "reward model represents", "reward models represent")} people who disagree. Each of these members ` +
    `votes between two answers; ${share}` +
    (trained && `${trained}${tested}. `) +
    undecided
  );
}

/** Who disagrees about what. Each voice links to the card of its member. */
function insight({ title, sentence, voices, unites, example, divides, trust, advice }) {
  const agreed = unites && example ? `${unites} Example: ${example}.` : unites;
  const findings = [agreed, divides && `People split most on: ${divides}.`, trust, advice].filter(Boolean);
  const largest = Math.max(...voices.map((voice) => voice.share));
  const rows = voices.map(({ member, share, name, wants, example: pair }) =>
    el(
      "li",
      { class: colour(member) },
      el("div", { class: "bar" }, sized(el("i"), share / largest)),
      el("b", { class: "number" }, percent(share)),
      el("a", { href: `#members/${member}` }, data(name, "b")),
      el("p", {}, data([wants || "no significant difference from the others", pair].filter(Boolean).join("; "))),
    ),
  );
  return [
    el("h2", {}, title),
    el("p", {}, el("b", {}, sentence)),
    rows.length > 0 && el("ul", { class: "voice-list", "aria-label": "Voices by weight" }, rows),
    ...findings.map((finding) => el("p", {}, data(finding))),
  ];
}

// --- tabs: arrow keys move between them, and the address holds the current one

function tabs(shown) {
  const buttons = [...at("tabs").querySelectorAll("[role=tab]")];
  const name = (button) => button.getAttribute("aria-controls");
  const select = (wanted, detail) => {
    for (const button of buttons) {
      const chosen = name(button) === wanted;
      button.setAttribute("aria-selected", String(chosen));
      button.setAttribute("tabindex", chosen ? "0" : "-1");
      at(name(button)).hidden = !chosen;
    }
    shown[wanted].show?.(detail);
  };
  const go = (button) => {
    history.pushState(null, "", `#${name(button)}`);
    select(name(button));
    if (at("main").getBoundingClientRect().top < 0) at("main").scrollIntoView();
  };
  roving(buttons, (next) => go(buttons[next]));
  for (const button of buttons) button.addEventListener("click", () => go(button));
  const follow = () => {
    const [wanted, detail] = location.hash.slice(1).split("/");
    if (wanted === "main") return; // the link Skip to content
    select(wanted in VIEWS ? wanted : "ask", detail);
  };
  addEventListener("hashchange", follow);
  addEventListener("popstate", follow);
  at("tabs").hidden = false;
  follow();
}
