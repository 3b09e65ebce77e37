"""What can be evaluated besides our ensembles: found by name, matched by text, read as shares of people."""

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import WriteLines
from test_classifier import write_bert
from test_ensemble import some_ensemble

from pluralign import DataError, PreferenceSet
from pluralign.learning.measure import Predictor, cross_fitted, reward_predictor
from pluralign.measuring.predictors import find_predictor, load_predictor
from pluralign.text.classifier import model_rewards
from pluralign.votes.prompts import Message

PROMPTS = ["tea ?", "tea ?", "rum ?", "rum ?"]
A = ["yes .", "no .", "yes .", "never ."]
B = ["no .", "never .", "no .", "yes ."]
SCORES = {("tea ?", "yes ."): 2.0, ("tea ?", "no ."): 0.5, ("tea ?", "never ."): 0.5, ("rum ?", "yes ."): -1.0,
          ("rum ?", "no ."): 1.5, ("rum ?", "never ."): 0.0}  # fmt: skip
DIFFERENCE = [1.5, 0.0, -2.5, 1.0]


def votes(**options: Any) -> PreferenceSet:
    return PreferenceSet.from_columns(PROMPTS, A, B, [4, 3, 1, 2], [1, 2, 4, 3], **options)


def score_rows(**changes: Any) -> list[dict[str, Any]]:
    return [{"prompt": p, "response": r, "score": s} | changes for (p, r), s in SCORES.items()]


def pair_rows(name: str, values: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"prompt": p, "response_a": a, "response_b": b, name: v}
        for p, a, b, v in zip(PROMPTS, A, B, values, strict=True)
    ]


def sigma(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def difference_of(subject: Predictor) -> list[float]:
    assert subject.difference is not None
    return [float(x) for x in subject.difference[:, 0]]


# --- finding ----------------------------------------------------------------------------------------------------------


def test_find_predictor_recognises_each_kind(tmp_path: Path) -> None:
    some_ensemble().save(tmp_path / "ensemble")
    (tmp_path / "model").mkdir()
    config = {"architectures": ["BertForSequenceClassification"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "scores").write_text("{}")
    names: list[str | Path] = [*(tmp_path / name for name in ("ensemble", "model", "scores")), "someone/reward-model"]
    assert [find_predictor(name) for name in names] == ["ensemble", "model", "file", "hub"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "nowhere: no such folder"), ("runs/scores.jsonl", r"runs/scores\.jsonl: there is no such file")],
)
def test_an_unknown_name_raises_data_error(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        find_predictor(name)


def test_an_unreachable_hub_id_raises_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(DataError, match=r"hf:some/model: .*no route.*; check the path, or the model id"):
        load_predictor("some/model", votes())


# --- files of scores --------------------------------------------------------------------------------------------------


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".csv")
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_parquet])
def test_scores_of_texts_are_matched_by_text_in_every_format(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path / "scores", score_rows()[::-1])
    subject = load_predictor(path, votes())
    assert (subject.kind, subject.name, subject.k) == ("scores", str(path), 1)
    assert difference_of(subject) == DIFFERENCE
    assert subject.readings["vote"].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert subject.readings["policy"] == pytest.approx([sigma(z) for z in DIFFERENCE])
    assert subject.level == "policy"


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_parquet])
@pytest.mark.parametrize("name", ["prob_hat", "prob"])
def test_probabilities_are_mirrored_for_reversed_pairs(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    shares = [0.75, 0.5, 0.25, 0.125]
    rows = pair_rows(name, shares)
    for row in rows[::2]:  # some pairs the other way round
        row["response_a"], row["response_b"], row[name] = row["response_b"], row["response_a"], 1 - row[name]
    subject = load_predictor(write(tmp_path / "shares", rows[::-1]), votes())
    assert subject.kind == "probabilities"
    assert {reading: list(share) for reading, share in subject.readings.items()} == {"prob": shares}
    assert subject.difference is None


def test_scores_of_pairs_and_lists_of_rewards_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": p, "response_a": b, "response_b": a, "score_a": 0.0, "score_b": d}
            for p, a, b, d in zip(PROMPTS, A, B, DIFFERENCE, strict=True)]  # fmt: skip
    assert difference_of(load_predictor(as_csv(tmp_path / "pairs", rows), votes())) == DIFFERENCE
    several = [{"prompt": p, "response": r, "rewards": [s, -s, 0.0]} for (p, r), s in SCORES.items()]
    for write in (as_jsonl, as_csv, as_parquet):
        subject: Any = load_predictor(write(tmp_path / "several", several), votes())
        np.testing.assert_array_equal(subject.difference, np.outer(DIFFERENCE, [1, -1, 0]))
        assert subject.note == "3 rewards per text, read as members of equal weight"
        assert subject.level == "vote"
        assert subject.prob_hat == pytest.approx([0.5] * 4)


def test_a_chat_prompt_is_matched_as_its_messages(write_jsonl: WriteLines) -> None:
    chat = (Message("user", "tea ?"),)
    pair = PreferenceSet.from_columns([chat], ["yes"], ["no"], [2], [1])
    turns = [{"role": "user", "content": "tea ?"}]
    row = {"prompt": turns, "response_a": "yes", "response_b": "no", "prob_hat": 0.7}
    assert load_predictor(write_jsonl([row]), pair).prob_hat == pytest.approx([0.7])
    with pytest.raises(DataError, match="1 of 1 pairs have no row"):
        load_predictor(write_jsonl([row | {"prompt": "tea ?"}]), pair)


def test_output_of_compare_is_matched_by_order(write_jsonl: WriteLines) -> None:
    shares = [0.1, 0.2, 0.3, 0.4]
    rows = [{"votes": [1, 0], "prob_hat": share, "prob_policy": 0.5, "unlike": {}} for share in shares]
    path = write_jsonl(rows)
    assert load_predictor(path, votes(dropped={"tie votes": 3})).prob_hat == pytest.approx(shares)
    unlike = write_jsonl(
        [*rows[:3], rows[3] | {"prob_hat": None, "unlike": {"a": "it repeats its words"}}], "unlike.jsonl"
    )
    assert load_predictor(unlike, votes()).prob_hat == pytest.approx([*shares[:3], 0.5])
    with pytest.raises(DataError, match=r"its 4 rows have no texts, and there are 3 pairs; add prompt, response_a"):
        load_predictor(path, votes()[:3])
    with pytest.raises(DataError, match=r"its 4 rows have no texts, and there are 4 pairs, after some were dropped"):
        load_predictor(path, votes(dropped={"pairs with fewer than 2 votes": 1}))


def test_missing_texts_are_counted_with_an_example(write_jsonl: WriteLines) -> None:
    rows = [row for row in score_rows() if row["response"] != "never ."]
    with pytest.raises(DataError, match=r"2 of 4 pairs have no score in it.*\"tea \?\".*\"no \.\".*\"never \.\""):
        load_predictor(write_jsonl(rows), votes())
    with pytest.raises(DataError, match="1 of 4 pairs have no row in it"):
        load_predictor(write_jsonl(pair_rows("prob_hat", [0.5] * 4)[1:]), votes())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"score": math.nan}, r"row 2: score is nan; give a finite number"),
        ({"score": "high"}, r"row 2: score is 'high', not a number"),
        ({"score": True}, r"row 2: score is True"),
        ({"score": [1.0, 2.0]}, r"row 2: score has another length than in earlier rows"),
        ({"prompt": None}, r"row 2: there is no value for prompt"),
        ({"response": "yes ."}, r"row 2: the same texts have a different value in an earlier row"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_row_is_named_by_number(write_jsonl: WriteLines, change: dict[str, Any], words: str) -> None:
    rows = score_rows()
    rows[1] |= change
    with pytest.raises(DataError, match=words):
        load_predictor(write_jsonl(rows), votes())


def test_shares_outside_0_to_1_and_unknown_columns_are_rejected(write_jsonl: WriteLines, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 3: prob_hat is 1\.5, not between 0 and 1; give a probability"):
        load_predictor(write_jsonl(pair_rows("prob_hat", [0.5, 0.5, 1.5, 0.5])), votes())
    with pytest.raises(DataError, match=r"its columns are prompt, answer; give rows \{prompt, response, score\}"):
        load_predictor(write_jsonl([{"prompt": "x", "answer": "y"}]), votes())
    with pytest.raises(DataError, match=r"row 1: there is no value for prompt"):
        load_predictor(write_jsonl([{"response_a": "x", "response_b": "y", "prob": 0.5}]), votes())
    with pytest.raises(DataError, match="it has no rows"):
        load_predictor(write_jsonl([]), votes())


# --- reward models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reward_model_has_three_readings(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "reward")
    subject = load_predictor(folder, votes())
    texts = list(SCORES)
    rewards = dict(zip(texts, model_rewards(folder, texts)[:, 0].tolist(), strict=True))
    expected = [rewards[p, a] - rewards[p, b] for p, a, b in zip(PROMPTS, A, B, strict=True)]
    assert difference_of(subject) == pytest.approx(expected, abs=1e-5)
    assert set(subject.readings) == {"vote", "policy", "tempered"}
    assert subject.prob_hat == pytest.approx([sigma(z) for z in expected], abs=1e-5)
    assert (subject.kind, subject.note) == ("reward model", "")


@pytest.mark.slow
def test_several_rewards_use_the_weights_of_the_configuration(tmp_path: Path) -> None:
    equal: Any = load_predictor(write_bert(tmp_path / "equal", 3), votes())
    assert equal.weights == pytest.approx([1 / 3] * 3)
    assert equal.note == "3 rewards, read as members of equal weight"
    weighted = load_predictor(write_bert(tmp_path / "own", 3, pluralign_weights=[0.5, 0.5, 0.0]), votes())
    assert weighted.weights == pytest.approx([0.5, 0.5, 0.0])
    assert "pluralign_weights" in weighted.note
    by_hand = [sum(0.5 * (z > 0) for z in row[:2]) for row in equal.difference.tolist()]
    assert weighted.prob_hat == pytest.approx(by_hand), "the same model but for its weights"
    with pytest.raises(DataError, match=r"pluralign_weights does not match its 3 rewards"):
        load_predictor(write_bert(tmp_path / "bad", 3, pluralign_weights=[0.5, 0.5]), votes())


# --- temperature ------------------------------------------------------------------------------------------------------


def test_the_temperature_corrects_a_wrong_scale() -> None:
    random = np.random.default_rng(0)
    true = random.normal(size=400)
    shares = np.array([sigma(z) for z in true])
    found, temperature = cross_fitted(20 * true[:, None], np.ones(1), shares, np.arange(400) // 4)
    assert temperature == pytest.approx(20, rel=0.05)
    np.testing.assert_allclose(found, shares, atol=0.01)


def test_the_temperature_of_a_prompt_is_chosen_on_other_prompts() -> None:
    """Turning one prompt's votes round leaves that prompt's own shares alone and moves those of the others."""
    random = np.random.default_rng(1)
    difference, prompt = random.normal(size=(60, 1)), np.arange(60) // 6
    shares = np.array([sigma(2 * z) for z in difference[:, 0]])
    before, _ = cross_fitted(difference, np.ones(1), shares, prompt)
    for one in range(10):
        own = prompt == one
        after, _ = cross_fitted(difference, np.ones(1), np.where(own, 1 - shares, shares), prompt)
        np.testing.assert_array_equal(after[own], before[own])
        assert np.abs(after - before).max() > 1e-3


def test_one_prompt_has_no_tempered_reading() -> None:
    subject = reward_predictor("r", "scores", np.ones((2, 1)), np.ones(1), votes()[:2])
    assert set(subject.readings) == {"vote", "policy"}
    same = reward_predictor("r", "scores", np.zeros((4, 1)), np.ones(1), votes())
    assert same.readings["tempered"].tolist() == [0.5] * 4
