"""Layouts of public data sets and annotation tools: rows as they are published, and the votes they become."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import pairs_of

from pluralign import DataError, load_preferences, load_rater_votes
from pluralign.votes.prompts import Message

ASK = {"role": "user", "content": "Tea?"}
MORE = {"role": "user", "content": "Why?"}


def said(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(*turns: dict[str, Any]) -> tuple[Message, ...]:
    return tuple(Message(**turn) for turn in turns)


def battle(winner: str, a: Any = "Yes.", b: str = "No.", **more: Any) -> dict[str, Any]:
    sides = {f"conversation_{side}": [ASK, said(text)] for side, text in zip("ab", (a, b), strict=True)}
    return {"model_a": "x", "model_b": "y", "winner": winner, "judge": "arena_user_1", "turn": 1} | sides | more


def twice(turn: int) -> dict[str, Any]:
    sides: Any = {
        f"conversation_{side}": [ASK, said(str(text)), MORE, said(str(text))]
        for side, text in zip("ab", YES[1:3], strict=True)
    }
    return battle("model_a", turn=turn, **sides)


def kaggle(prompt: list[str], a: list[str | None], b: list[str], winner: str) -> dict[str, Any]:
    texts = {"prompt": json.dumps(prompt), "response_a": json.dumps(a), "response_b": json.dumps(b)}
    return texts | {f"winner_{kind}": int(kind == winner) for kind in ("model_a", "model_b", "tie")}


def uttered(turn: int, prompt: str, response: str, score: int, chosen: bool = False) -> dict[str, Any]:
    ids = {"utterance_id": f"ut{turn}{score}", "conversation_id": "c1", "user_id": "user7", "turn": turn}
    return ids | {"user_prompt": prompt, "model_response": response, "score": score, "if_chosen": chosen}


UTTERED = [uttered(0, "Tea?", "Yes.", 80, True), uttered(0, "Tea?", "No.", 30), uttered(0, "Tea?", "Rum.", 30)]
UTTERED += [uttered(1, "Why?", "Warm.", 9), uttered(1, "Why?", "Wet.", 50, True)]
HISTORY = [{"turn": 0, **ASK}, *({**said(one["model_response"]), **one, "role": "model"} for one in UTTERED[:3])]
PRISM = [("Tea?", "Yes.", "No.", 1, 0, 0), ("Tea?", "Yes.", "Rum.", 1, 0, 0)]
FIELDS = {"prompt": "Tea?", "response-1": "Yes.", "response-2": "No."}
PLACES = [{"value": "response-2", "rank": 1}, {"value": "response-1", "rank": 2}]
TASK = {"data": {"prompt": "Tea?", "answer1": "Yes.", "answer2": "No."}}
ITEMS = [{"id": "x", "title": "Yes.", "body": "Yes."}, {"id": "y", "body": "No."}, {"id": "z", "body": "Rum."}]
IDEAS = {"Vote ID": 1, "Session ID": 54230, "Winner Text": "Yes.", "Loser Text": "No.", "Question ID": 970}
STEPS = {"prompt": "Tea?", "response": "Yes.", "correctness": 4, "coherence": 4, "complexity": 1, "verbosity": 2}
YES, NO, TIE = ("Tea?", "Yes.", "No.", 1, 0, 0), ("Tea?", "Yes.", "No.", 0, 1, 0), ("Tea?", "Yes.", "No.", 1, 1, 0)
THREE = ("Tea?", "Yes.", "Rum.", 1, 0, 0), ("Tea?", "No.", "Rum.", 1, 0, 0)
CHAT = asked(ASK)


def ranked(*scores: int) -> list[dict[str, Any]]:
    texts = zip(("Yes.", "No.", "Rum."), scores, strict=True)
    return [{"response": text, "answer": text, "model": "m", "overall_score": s, "rank": -s} for text, s in texts]


def argilla(user: str, value: Any) -> dict[str, Any]:
    return {"user_id": user, "value": value, "status": "submitted"}


FORMATS: list[tuple[str, list[dict[str, Any]], list[Any], int | None]] = [
    ("Anthropic HH",
     [{"chosen": "\n\nHuman: Tea?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Tea?\n\nAssistant: No."}],
     [(CHAT, *YES[1:])], None),
    ("MultiPref",
     [{"text": "Tea?", "completion_a": "Yes.", "completion_b": "No.", "expert_worker_annotations": None,
       "normal_worker_annotations": [{"evaluator": "x", "overall_pref": "A-is-clearly-better"},
                                     {"evaluator": "y", "overall_pref": "B-is-slightly-better"}]}], [TIE], None),
    ("HelpSteer2 ratings", [STEPS | {"helpfulness": 4}, STEPS | {"response": "No.", "helpfulness": 2}], [YES], None),
    ("HelpSteer2 preferences",
     [{"prompt": "Tea?", "response_1": "Yes.", "response_2": "No.", "preference_strength": 2}], [NO], None),
    ("HelpSteer3",
     [{"context": [ASK], "response1": "Yes.", "response2": "No.", "individual_preference": [{"score": -1}]}],
     [(CHAT, *YES[1:])], None),
    ("Chatbot Arena", [battle("model_a"), battle("tie (bothbad)"), battle("model_b", "No.", "Yes.")],
     [(CHAT, "Yes.", "No.", 2, 0, 1)], 2),
    ("Chatbot Arena",
     [battle("model_b", turn=2, conversation_a=[ASK, said("Yes."), MORE, said("Warm.")])],
     [(CHAT, "Yes.\n\nuser: Why?\n\nassistant: Warm.", "No.", 0, 1, 0)], None),
    ("Chatbot Arena", [battle("both_bad"), battle("model_a", [{"type": "text", "text": "Yes.", "image": None}])],
     [(CHAT, *YES[1:-1], 1)], 2),
    ("Chatbot Arena", [twice(turn) for turn in (1, 2)],  # MT-Bench: votes on the first turn come with the second
     [(CHAT, *YES[1:]), (CHAT, *(f"{text}\n\nuser: Why?\n\nassistant: {text}" for text in YES[1:3]), 1, 0, 0)], 2),
    ("LMSYS (Kaggle)", [kaggle(["Tea?"], ["Yes."], ["No."], "model_a"), kaggle(["Tea?"], ["Yes."], ["No."], "tie")],
     [(CHAT, "Yes.", "No.", 1, 0, 1)], None),
    ("LMSYS (Kaggle)", [kaggle(["Tea?", "Why?"], ["Yes.", None], ["Yes.", "Wet."], "model_b")],
     [(asked(ASK, said("Yes."), MORE), "", "Wet.", 0, 1, 0)], None),
    ("All Our Ideas", [IDEAS, IDEAS | {"Valid": "FALSE"}],
     [("Which idea is better? (wiki survey 970)", "No.", "Yes.", 0, 1, 0)], None),
    ("UltraFeedback", [{"instruction": "Tea?", "completions": ranked(9, 7, 2)}], [YES, *THREE], 3),
    ("Nectar", [{"prompt": "\n\nHuman: Tea?\n\nAssistant: ", "answers": ranked(-1, -2, -3)}],
     [(CHAT, *pair[1:]) for pair in (YES, *THREE)], 3),
    ("PRISM", [{"conversation_id": "c1", "user_id": "user7", "conversation_history": HISTORY}],
     PRISM, 3),
    ("PRISM", UTTERED, [*PRISM, (asked(ASK, said("Yes."), MORE), "Warm.", "Wet.", 0, 1, 0)], 3),
    ("Argilla",  # a ranking of version 1, and a discarded one
     [{"fields": FIELDS, "responses": [
         {"user_id": "u1", "status": "submitted", "values": {"better": {"value": PLACES}}},
         {"user_id": "u2", "status": "discarded", "values": {"better": {"value": PLACES}}}]}], [NO], None),
    ("Argilla",  # the same of version 2, and ratings of both responses
     [{"fields": FIELDS, "responses": {"better": [argilla("u1", ["response-2", "response-1"])]}},
      {"fields": FIELDS, "responses": {f"response-{i}_helps": [argilla("u2", 5 - i)] for i in (1, 2)}}], [TIE], None),
    ("Argilla",  # flat records of versions 1 and 2, and a rating per record
     [FIELDS | {"better": {"value": [{"value": ["response-1", "response-2"], "rank": [2, 1]}], "user_id": ["u1"]},
                "better-suggestion": None}],
     [NO], None),
    ("Argilla",
     [{"prompt": "Tea?", "answer": text, "stars.responses": [stars], "stars.responses.users": ["u1"]}
      for text, stars in (("Yes.", 5), ("No.", 3), ("Rum.", 1))], [YES, *THREE], 3),
    ("Label Studio",
     [TASK | {"annotations": [{"completed_by": {"id": 3, "email": "ann@x.org"}, "was_cancelled": False, "result": [
         {"type": "pairwise", "from_name": "pw", "to_name": "t1,t2", "value": {"selected": "right"}}]}]}], [NO], None),
    ("Label Studio",  # as in the documentation of Pairwise: no prompt
     [{"data": {"text1": "Yes.", "text2": "No."}, "annotations": [{"completed_by": 3, "result": [
         {"type": "pairwise", "value": {"selected": "left"}}]}]}], [("Which is better?", *YES[1:])], None),
    ("Label Studio",
     [{"data": {"prompt": "Tea?", "items": ITEMS}, "annotations": [{"completed_by": 3, "result": [
         {"type": "ranker", "value": {"ranker": {"_": [], "rank": ["x", "y", "z"]}}}]}]}], [YES, *THREE], 3),
    ("Polis",
     [{"participant": i, "group-id": "", "n-votes": 3, "Yes.": "1", "No.": votes[0], "Rum.": votes[1]}
      for i, votes in enumerate((("-1", "0"), ("1", "")))],
     [("Which statement do you agree with?", *pair) for pair in
      (("Yes.", "No.", 1, 0, 1), ("Yes.", "Rum.", 1, 0, 0), ("No.", "Rum.", 0, 1, 0))], 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "pairs", "largest"), FORMATS)
def test_public_layouts_are_recognised_and_keep_what_each_person_said(
    name: str,
    rows: list[dict[str, Any]],
    pairs: list[Any],
    largest: int | None,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    votes = load_preferences(rows)
    assert f"the records: read as {name}. " in caplog.text
    found = pairs_of(votes)
    turned = [(prompt, b, a, for_b, for_a, ties) for prompt, a, b, for_a, for_b, ties in found]
    assert all(pair in found or pair in turned for pair in pairs), found
    assert len(votes) == len(pairs)
    assert (votes.judgments and votes.judgments.sizes.max()) == largest
    assert not {"judge", "user_id", "evaluator", "annotator_id", "session_id"} & set(votes.columns)
    pytest.importorskip("pandas").DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    assert pairs_of(load_preferences(tmp_path / "rows.csv")) == found, "all values are texts there"


def test_public_layouts_come_from_any_source(tmp_path: Path) -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    rows = [battle("model_a"), battle("tie"), battle("model_b", "Rum.")]
    expected = load_preferences(rows)
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    pandas.DataFrame(rows).to_parquet(tmp_path / "battles.parquet")
    pandas.DataFrame(rows).to_csv(tmp_path / "battles.csv")
    frame = pandas.read_parquet(tmp_path / "battles.parquet")  # lists are numpy arrays there
    files = [tmp_path / name for name in ("list.json", "battles.parquet", "battles.csv")]
    for source in (*files, frame, datasets.Dataset.from_list(rows)):
        assert pairs_of(load_preferences(source)) == pairs_of(expected)
    (tmp_path / "list.json").write_text("[{]")
    with pytest.raises(DataError, match=r"list\.json: the file is not a JSON list"):
        load_preferences(tmp_path / "list.json")


def test_people_of_public_layouts_are_raters_by_the_names_of_their_columns() -> None:
    rows = [*UTTERED, *({**one, "conversation_id": "c2", "user_id": "user8"} for one in UTTERED)]
    votes = load_rater_votes(rows, "user_id")
    assert (votes.n_raters, len(votes), len(votes.preferences)) == (2, 6, 3)


def test_statements_of_polis_are_read_from_the_files_beside_the_votes(tmp_path: Path) -> None:
    votes = tmp_path / "2026-participant-votes.csv"
    votes.write_text("participant,group-id,n-votes,0,1,2\n0,1,3,1,-1,1\n1,,2,-1,,1\n")
    with pytest.raises(DataError, match=r"keep comments\.csv of the export beside the file"):
        load_preferences(votes)
    comments = "comment-id,moderated,comment-body\n0,1,Yes.\n1,0,No.\n2,-1,Buy this!\n"
    (tmp_path / "2026-comments.csv").write_text(comments)
    (tmp_path / "2026-summary.csv").write_text('topic,"Tea, please?"\nvoters,2\n')
    assert pairs_of(load_preferences(tmp_path)) == [("Tea, please?", "Yes.", "No.", 1, 0, 0)]


@pytest.mark.parametrize("bad", [{}, {"conversation_a": None}, {"conversation_a": [{"role": 3}]}, {"winner": "x"}])
def test_a_bad_record_of_a_public_layout_is_one_sentence(bad: dict[str, Any]) -> None:
    broken = battle("tie") | bad if bad else {"winner": "tie"}
    with pytest.raises(DataError, match=r"the records, row 2: [^\n]*skip_bad=True\.$"):
        load_preferences([battle("model_a"), broken])
