"""Three new users, end to end: an engineer with a CSV file, a product engineer with an OpenAI client, a researcher.

Each test asserts what a newcomer must be able to trust: no false statement about people, no figures on training
prompts, no verdict from a few prompts, no comparison that few votes cannot support; and that an insight comes first.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import facts_of, printed, run
from served import Client, running

import pluralign
from pluralign import PreferenceSet, RewardEnsemble, town_hall
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.verdict import FEW_VOTES, headline

FAST_OPTIONS: dict[str, Any] = {"encoder": "none", "k": 2, "target": "mixture"}
FAST = [word for name, value in FAST_OPTIONS.items() for word in (f"--{name}", str(value))]
OURS = ("prompt", "response_a", "response_b", "votes_a", "votes_b")
COLUMNS = dict(zip(OURS, ("question", "answer_1", "answer_2", "for_1", "for_2"), strict=True))
"""Their names for our columns."""
VERDICTS = ("Better than", "Not significantly different from", "Worse than")
RENAME = [word for ours, theirs in COLUMNS.items() for word in ("--rename", f"{ours}={theirs}")]


def write_csv(votes: PreferenceSet, path: Path) -> Path:
    """Write votes as a team's spreadsheet would have them: its own column names, and a column that nobody needs."""
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow([*COLUMNS.values(), "batch"])
        rows.writerows([*(record[name] for name in COLUMNS), "spring"] for record in votes.to_records())
    return path


def prompts_only(n: int, **options: Any) -> PreferenceSet:
    """Return votes on n prompts, with eight pairs each."""
    return town_hall(8 * n, **options).preferences


# --- an engineer with annotators' votes, on the command line ----------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engineer's folder: votes on 80 prompts, and an ensemble fitted to all of them with the default split."""
    folder = tmp_path_factory.mktemp("engineer")
    write_csv(prompts_only(80), folder / "votes.csv")
    fitted = facts_of("fit", folder / "votes.csv", *RENAME, "-o", folder / "ensemble", *FAST)
    (folder / "fit.json").write_text(json.dumps(fitted))
    return folder


def test_engineer_gets_the_exact_rename_line_and_inspects_the_votes(work: Path, tmp_path: Path) -> None:
    clear = tmp_path / "votes.csv"  # names whose meaning is known are renamed with a note
    clear.write_text((work / "votes.csv").read_text().replace("for_1,for_2", "votes_1,votes_2", 1))
    done = run("inspect", clear, "--json")
    assert "--rename votes_a=votes_1 --rename votes_b=votes_2" in done.stderr
    assert json.loads(done.stdout)["pairs"] == 640
    done = run("inspect", work / "votes.csv")
    assert (done.returncode, done.stdout) == (2, "")
    for flag in ("prompt=question", "response_a=answer_1", "response_b=answer_2"):
        assert f"--rename {flag}" in done.stderr
    found = facts_of("inspect", work / "votes.csv", *RENAME)
    assert (found["pairs"], found["prompts"], found["votes_per_pair"]) == (640, 80, 5)


def test_evaluating_on_the_training_file_gives_the_figures_of_fit(work: Path) -> None:
    fitted = json.loads((work / "fit.json").read_text())
    done = run("evaluate", work / "ensemble", work / "votes.csv", *RENAME, "--group", "length", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("brier", "brier_corrected", "log_loss"):
        assert found["test"][name] == pytest.approx(fitted["test"][name])
    assert found["test"]["interval"] == pytest.approx(fitted["test"]["interval"])
    assert found["baselines"]["soft_bt"]["brier"] == pytest.approx(fitted["baselines"]["soft_bt"]["brier"])
    assert found["left_out"]["pairs"] == fitted["data"]["train_pairs"] > 0
    assert found["left_out"]["prompts"] == fitted["data"]["train_prompts"]
    left_out = f"Left out {found['left_out']['prompts']} prompts ({found['left_out']['pairs']} pairs)"
    assert left_out in done.stderr
    assert "--all" in done.stderr
    leaked = facts_of("evaluate", work / "ensemble", work / "votes.csv", *RENAME, "--group", "length", "--all")
    assert leaked["pairs"] == 640
    assert leaked["test"]["brier_corrected"] < fitted["test"]["brier_corrected"], "scores that are too good"


def test_fit_and_evaluate_start_with_the_same_main_number_and_verdict(work: Path) -> None:
    shown = printed("evaluate", work / "ensemble", work / "votes.csv", *RENAME)
    figures = json.loads((work / "fit.json").read_text())["test"]
    low, high = figures["interval"]["low"], figures["interval"]["high"]
    assert f"Main number: corrected Brier score {figures['brier_corrected']:.4f} [{low:.4f}, {high:.4f}]" in shown
    assert sum(words in shown for words in VERDICTS) == 1
    assert shown.index("Main number") < shown.index("Next: ") < shown.index("Brier  ")
    printed("report", work / "ensemble", "-o", work / "report.html")
    page = (work / "report.html").read_text()
    assert f"{figures['brier_corrected']:.4f}" in page
    names = [card["name"] for card in facts_of("profile", work / "ensemble")["members"]]
    assert len(set(names)) == len(names)
    assert "Close to the average" not in page + printed("profile", work / "ensemble")


def test_other_votes_do_not_replace_an_ensemble_by_accident(work: Path, tmp_path: Path) -> None:
    other = write_csv(prompts_only(25, seed=9), tmp_path / "other.csv")
    before = (work / "ensemble" / "ensemble.json").read_bytes()
    done = run("fit", other, *RENAME, "-o", work / "ensemble", *FAST)
    assert done.returncode == 2
    assert "--overwrite" in done.stderr
    assert (work / "ensemble" / "ensemble.json").read_bytes() == before


def test_the_insight_comes_first_on_every_surface(work: Path) -> None:
    title = json.loads((work / "fit.json").read_text())["insight"]["title"]
    shown = printed("evaluate", work / "ensemble", work / "votes.csv", *RENAME)
    assert shown.index("Votes on") < shown.index("Trust: a predicted share") < shown.index("Main number")
    ensemble = RewardEnsemble.load(work / "ensemble")
    assert str(ensemble).splitlines()[0] == title
    printed("report", work / "ensemble", "-o", work / "report.html")
    report = (work / "report.html").read_text().partition("<main>")[2]
    opening, folded = report.split("<details", 1)
    assert title in opening
    assert "Brier" not in opening + ensemble._repr_html_().partition("Main number")[0]
    assert "<details" not in opening
    assert "Brier" in folded
    printed("export", work / "ensemble", "-o", work / "exported")
    card = (work / "exported" / "README.md").read_text()
    assert card.index(title) < card.index("Brier")


def test_ids_of_annotators_are_offered_for_use_and_not_kept(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Shall we build {i}?", "chosen": f"Yes, {i} times.", "rejected": "No!", "annotator_id": f"ann-{j}"}
        for i in range(12)
        for j in range(3)
    ]
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("fit", tmp_path / "votes.jsonl", "-o", tmp_path / "out", *FAST)
    assert done.returncode == 0, done.stderr
    assert "to use them: --raters annotator_id" in done.stderr
    assert not [file.name for file in (tmp_path / "out").iterdir() if b"ann-" in file.read_bytes()]


def test_candidates_for_another_question_and_a_single_candidate_state_no_share(work: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "candidates.jsonl", "I say yes to the trees, because nature matters to all of us."
    file.write_text(json.dumps({"prompt": "Shall we plant trees?", "responses": [text]}))
    done = run("answer", work / "ensemble", "Shall we dance?", "--candidates", file)
    assert done.returncode == 2
    assert "candidates are for another prompt" in done.stderr
    shown = printed("answer", work / "ensemble", "Shall we plant trees?", "--candidates", file)
    assert "it has no rival" in shown
    assert "%" not in shown
    question = str(load_held_out(work / "ensemble").preferences.prompts[0])
    assert "Slate: " in printed("answer", work / "ensemble", question), "held-out candidates are used"


def test_small_things_are_said_right(work: Path, tmp_path: Path) -> None:
    assert run("inspect", "helpstear2").stderr.endswith("did you mean 'helpsteer2'?\n")
    encoded = printed("encode", "demo:60", "-o", tmp_path / "features", "--encoder", "none")
    assert " texts, " in encoded
    assert "1 shard," in encoded
    certified = printed("certify", work / "ensemble")
    assert "−0.0000" not in certified
    assert "(0 is perfect)" not in certified


# --- few prompts, few votes -------------------------------------------------------------------------------------------


def test_eight_prompts_give_no_interval_and_no_verdict(tmp_path: Path) -> None:
    shown = printed("fit", write_csv(prompts_only(8), tmp_path / "v.csv"), *RENAME, "-o", tmp_path / "e", *FAST)
    assert "[" not in shown.split("Main number: ")[1].split("\n")[0]
    assert "No verdict: " in shown
    assert "Next: collect votes on more prompts: at least 20 for testing." in shown
    assert not any(verdict in shown for verdict in VERDICTS)


def test_three_votes_per_pair_are_not_compared_with_the_floor(tmp_path: Path) -> None:
    votes = write_csv(prompts_only(60, votes_per_pair=3), tmp_path / "votes.csv")
    inspected = printed("inspect", votes, *RENAME)
    fitted = printed("fit", votes, *RENAME, "-o", tmp_path / "ensemble", *FAST)
    evaluated = printed("evaluate", tmp_path / "ensemble", votes, *RENAME)
    for shown in (inspected, fitted, evaluated):
        assert FEW_VOTES in " ".join(shown.split())
        assert "-0.0000" not in shown.replace("−", "-")
    for shown in (fitted, evaluated):
        assert not [line for line in shown.splitlines() if line.strip().startswith("floor")]


# --- a product engineer with an OpenAI client -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(work: Path) -> Iterator[Client]:
    folder = work / "ensemble"
    with running(RewardEnsemble.load(folder), held_out=load_held_out(folder)) as client:
        yield client


def test_openai_client_gets_an_answer_or_learns_why_there_is_none(served: Client, work: Path) -> None:
    question = load_held_out(work / "ensemble").preferences
    of_first = question.prompt_index == 0
    responses = set(question.responses[[*question.a_index[of_first], *question.b_index[of_first]]])
    create: Any = served.openai.chat.completions.create
    asked = {"model": "town:consensus", "messages": [{"role": "user", "content": str(question.prompts[0])}]}
    assert asked["model"] in [model.id for model in served.openai.models.list()]
    assert create(**asked).choices[0].message.content in responses
    own = ["Yes, with a pilot first.", "No."]
    assert create(**asked, extra_body={"candidates": own}).choices[0].message.content in own
    with pytest.raises(openai.BadRequestError, match="start the server with --model or --base-url"):
        create(model="town", messages=[{"role": "user", "content": "A new question?"}])
    with pytest.raises(openai.BadRequestError, match="tools"):
        create(**asked, tools=[{"type": "function", "function": {"name": "f"}}], extra_body={"candidates": own})
    assert served.send("/health")[0] == 200


def test_the_server_compares_as_python_does(served: Client, work: Path) -> None:
    pair = {"prompt": "Trees?", "response_a": "Yes, with a pilot first.", "response_b": "No."}
    found = served.json("/v1/compare", {"pairs": [pair]})["results"][0]
    votes = pluralign.load_preferences([pair | {"votes_a": 1, "votes_b": 1}])
    assert found["prob_hat"] == pytest.approx(float(RewardEnsemble.load(work / "ensemble").prob_hat(votes)[0]))


def test_gibberish_has_no_share_and_never_wins(served: Client) -> None:
    nonsense = ["asdf jkl qwer", "blue blue blue the the"]
    sensible = "I am firmly for planting more trees in the town, because nature matters, and the cost is small."
    both = [sensible, "I am against the trees, because the council should spend less and tax us less."]
    for candidates in ([*nonsense, sensible], [*nonsense, *both]):
        asked = {"prompt": "Shall we plant trees?", "candidates": candidates}
        found = served.json("/v1/answer", asked)
        assert set(found["unlike"]) == set(nonsense)
        assert not {entry["text"] for entry in found["answers"]} & set(nonsense)
        assert found["consensus"]["text"] not in nonsense
        assert "unlike anything these people voted on" in found["notes"][0]
        drawn = served.json("/v1/answer", asked | {"mode": "distributional"})["answers"][0]["text"]
        assert drawn not in nonsense
    like = {"prompt": "Shall we plant trees?", "candidates": both, "mode": "steerable", "like": "xyzzy qwerty"}
    assert "changed nothing" in served.json("/v1/answer", like)["notes"][0]


def test_rewards_of_members_are_not_averaged(served: Client, fitted: RewardEnsemble) -> None:
    status, code, message = served.error("/get_reward", {"query": ["Tea? Yes."], "prompts": ["Tea?"]})
    assert (status, code) == (422, "member_required")
    with pytest.raises(pluralign.UsageError, match="different scales"):
        fitted.as_reward_func()
    assert "different scales" in message


# --- a researcher in Python -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return pluralign.load_preferences(list(prompts_only(80).to_records()))


@pytest.fixture(scope="module")
def fitted(votes: PreferenceSet) -> RewardEnsemble:
    return pluralign.fit(votes, **FAST_OPTIONS)


def test_researcher_evaluates_on_the_votes_of_the_fit_and_gets_its_figures(
    votes: PreferenceSet, fitted: RewardEnsemble
) -> None:
    result, own = pluralign.evaluate(fitted, votes, groups=[]), fitted.record.evaluation
    assert own is not None
    assert result.test.brier == pytest.approx(own.test.brier)
    assert result.left_out.prompts + result.prompts == 80
    assert str(result.headline).startswith("Main number: corrected Brier score")
    steady = replace(fitted.record, seed_spread=None)  # only a fit has a spread over seeds
    assert str(result.headline).splitlines()[:2] == str(headline(own, steady)).splitlines()[:2]
    leaked = pluralign.evaluate(fitted, votes, groups=[], all_prompts=True)
    assert leaked.left_out.pairs == 0
    assert leaked.test.brier_corrected < result.test.brier_corrected


def test_python_is_answered_in_python(votes: PreferenceSet, fitted: RewardEnsemble) -> None:
    rows = [{COLUMNS[name]: value for name, value in row.items() if name in COLUMNS} for row in votes.to_records()]
    with pytest.raises(pluralign.DataError, match=r"rename=\{'prompt': 'question'") as caught:
        pluralign.load_preferences(rows)
    assert "--rename" not in str(caught.value)
    assert len(pluralign.load_preferences(rows, rename=COLUMNS)) == 640
    with pytest.raises(pluralign.UsageError, match="did you mean 'minilm'"):
        pluralign.fit(votes, encoder="minilmm")
    other = pluralign.fit(votes, **FAST_OPTIONS | {"k": 1, "seed": 3})
    assert "ensemble 2 (k = 1)" in str(pluralign.evaluate(fitted, votes, against=[other], groups=[]))
    assert "majority share" in str(pluralign.inspect(votes))


def test_rows_of_other_projects_are_read_as_they_are() -> None:
    dialogue = "\n\nHuman: Tea?\n\nAssistant:"
    layouts: list[list[dict[str, Any]]] = [
        [{"chosen": f"{dialogue} Yes, please.", "rejected": f"{dialogue} No."}],
        [{"prompt": "Tea?", "response_a": "Yes.", "response_b": "No.", "winner": "model_a"}],
        [{"instruction": "Tea?", "completions": [{"response": "Yes.", "overall_score": 4},
                                                 {"response": "No.", "overall_score": 2}]}],
    ]  # fmt: skip
    for rows in layouts:
        read = pluralign.load_preferences(rows, min_votes=1)
        assert len(read) == 1
        assert {str(text) for text in read.responses} <= {"Yes.", "Yes, please.", "No."}
