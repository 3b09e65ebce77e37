"""Early stopping over the stages of a fine-tuned ensemble: when it stops, what it keeps, and that it resumes."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny import two_camps, write_backbone

from pluralign.cli.render.fit import fit_page
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.learning import tuned as early_stopping
from pluralign.learning.backbone.train import StepCallback
from pluralign.learning.fit import fit
from pluralign.learning.tuned import StageValidation, stopped_improving
from pluralign.votes.load import load_preferences
from pluralign.votes.preferences import PreferenceSet, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def camps(folder: Path, prompts: int) -> PreferenceSet:
    path = folder / "camps.jsonl"
    path.write_text("\n".join(map(json.dumps, two_camps(prompts))))
    return load_preferences(str(path))


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    return camps(tmp_path_factory.mktemp("votes"), 200)


@pytest.fixture(scope="module")
def stages(votes: PreferenceSet) -> StageValidation:
    texts, validation = votes.items(), votes.prompt_index % 10 == 0
    return StageValidation(votes, texts.a, texts.b, ~validation, validation)


def rewards(votes: PreferenceSet, *words: str) -> Any:
    """Return the rewards of members that like one word each; a member of an unknown word is a fixed random one."""
    responses = [response for _, response in texts_of(votes)]
    noise = np.random.default_rng(5).normal(size=len(responses))
    known = [np.array([float(word in response.split()) for response in responses]) for word in words]
    return np.column_stack([liked + (0 if liked.any() else noise) for liked in known]).astype(np.float32)


@pytest.mark.parametrize(
    ("errors", "stopped"),
    [
        ([0.3], False),
        ([0.3, 0.2, 0.1], False),
        ([0.1, 0.2], False),
        ([0.1, 0.2, 0.3], True),
        ([0.1, 0.2, 0.05], False),
        ([0.2, 0.1, 0.1, 0.1], True),
    ],
)
def test_training_stops_two_stages_after_the_lowest_error(errors: list[float], stopped: bool) -> None:
    assert stopped_improving(errors) is stopped


def test_stages_are_enough_once_both_camps_have_a_member(stages: StageValidation) -> None:
    outputs = rewards(stages.votes, "tea", "rum", "?", "?")
    assert [stages.enough(outputs[:, :j]) for j in range(1, 5)] == [False, False, False, True]
    chosen = stages.choose(outputs)
    assert (chosen.k, chosen.stages) == (2, 4)
    assert chosen.stopped.startswith("the validation Brier score has not improved for 2 stages: 0.")


def test_test_votes_do_not_change_the_choice(stages: StageValidation, votes: PreferenceSet) -> None:
    outputs, test = rewards(votes, "tea", "rum", "?", "?"), votes.prompt_index % 10 == 1
    swapped = replace(
        votes,
        votes_a=np.where(test, votes.votes_b, votes.votes_a),
        votes_b=np.where(test, votes.votes_a, votes.votes_b),
    )
    without = replace(stages, learned=stages.learned & ~test)
    assert replace(without, votes=swapped).choose(outputs) == without.choose(outputs)


def test_the_largest_size_is_a_reason_to_stop(stages: StageValidation) -> None:
    chosen = stages.choose(rewards(stages.votes, "tea", "rum"))
    assert (chosen.k, chosen.stages) == (2, 2)
    assert chosen.stopped.startswith("2 stages are the most that --k auto trains: 0.")


@pytest.mark.slow
def test_auto_trains_no_stage_after_the_stop_and_resumes_without_training_again(
    tmp_path: Path, votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_stopping, "stopped_improving", lambda errors: len(errors) == 3)
    backbone, folder = write_backbone(tmp_path / "llama"), tmp_path / "town"
    options: dict[str, Any] = {
        "method": "stagewise", "k": "auto", "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 32,
        "micro_batch": 64, "epochs": 4,
    }  # fmt: skip
    trained: list[str] = []
    end, broken = StepCallback.on_step_end, "training-member-2"

    def counts(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        trained.append(Path(args.output_dir).name)
        if trained[-1] == broken:
            raise KeyboardInterrupt
        end(self, args, state, control, **rest)

    monkeypatch.setattr(StepCallback, "on_step_end", counts)
    with pytest.raises(KeyboardInterrupt):
        fit(votes, folder=folder, backbone=str(backbone), **options)
    assert set(trained) == {"training-member-0", "training-member-1", "training-member-2"}
    trained.clear()
    broken = ""
    ensemble = fit(votes, folder=folder, backbone=str(backbone), **options)
    assert set(trained) == {"training-member-2"}

    record = ensemble.record
    assert record.tuning is not None
    assert record.evaluation is not None
    assert (ensemble.k, record.k, record.tuning["stages"]) == (2, 2, 3)
    assert [row.k for row in record.history] == [1, 2, 3]
    assert record.kept == record.history[1]
    assert record.evaluation.test.brier == pytest.approx(record.history[1].test_brier)
    assert record.history[1].test_brier < 0.5 * record.history[0].test_brier
    assert sorted(path.name for path in (folder / "backbone").iterdir()) == ["member-0", "member-1"]
    loaded = RewardEnsemble.load(folder)
    np.testing.assert_array_equal(loaded.prob_hat(votes, "vote"), ensemble.prob_hat(votes, "vote"))
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(*fit_page(ensemble, str(folder)))
    shown = " ".join(console.export_text().split())
    assert "Training stopped after 3 stages, 2 of them kept: the validation Brier score has not improved" in shown
