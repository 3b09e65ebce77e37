"""Three new users, end to end: an engineer with a CSV file, a product engineer with an OpenAI client, a researcher.

Each test asserts what a newcomer must be able to trust: no false statement about people, no figures on training
prompts, no verdict from a few prompts, no comparison that few votes cannot support; and that an insight comes first.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import facts_of, printed, run
from served import Client, running

import pluralign
from pluralign import PreferenceSet, RewardEnsemble, town_hall
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.verdict import FEW_VOTES

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


# --- a researcher in Python -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return pluralign.load_preferences(list(prompts_only(80).to_records()))


@pytest.fixture(scope="module")
def fitted(votes: PreferenceSet) -> RewardEnsemble:
    return pluralign.fit(votes, **FAST_OPTIONS)


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
