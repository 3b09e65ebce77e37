"""Layouts of public data sets and annotation tools: their records become rows of the layouts in ``layouts``.

A row is what one person said: a vote on a pair or a ranking, with the id of the person where the data have one. Nothing
is averaged over people. docs/reference/data.md describes each layout, its sources, and what is assumed.
"""

import csv
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.errors import DataError
from pluralign.core.text import one_line
from pluralign.votes.builder import BadRows
from pluralign.votes.columns import guess_columns
from pluralign.votes.formats import file_records
from pluralign.votes.prompts import Message, PromptLike
from pluralign.votes.values import (
    Record,
    Records,
    RowError,
    checked_text,
    parsed,
    read_messages,
    read_number,
    split_dialogues,
)

Convert: TypeAlias = Callable[[Any, BadRows], Iterable[Record]]
"""Turns one record, or the records of one group, into rows."""


@dataclass(frozen=True)
class PublicFormat:
    """A layout of others: how it is recognised, and how its records become rows of our layouts."""

    name: str
    needs: tuple[str, ...]
    """Its columns."""
    assumed: str
    """How it is read, for a note: the docstring of ``convert``."""
    convert: Convert
    key: Callable[[Record], Hashable] | None
    """Records with the same key are converted together."""
    holds: Callable[[Record], bool]
    """Whether the first record has this layout, if it has the columns."""

    def matches(self, record: Record) -> bool:
        """Return whether a file whose first record this is has the layout."""
        return all(name in record for name in self.needs) and self.holds(record)

    def rows(self, records: Records, bad: BadRows) -> Iterator[tuple[int, Record]]:
        """Yield rows of our layouts, with the row numbers of the records."""
        groups: Iterable[tuple[int, Any]] = records
        if self.key is not None:
            by_key: dict[Hashable, tuple[int, list[Record]]] = {}
            for row, record in records:
                with _checked(bad, row):
                    by_key.setdefault(self.key(record), (row, []))[1].append(record)
            groups = by_key.values()
        for row, group in groups:
            converted: list[Record] = []
            with _checked(bad, row):
                converted = list(self.convert(group, bad))
            for one in converted:
                yield row, one


@contextmanager
def _checked(bad: BadRows, row: int) -> Iterator[None]:
    """Report a record whose values are not of the types that its format has."""
    with bad.row(row):
        try:
            yield
        except DataError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, csv.Error) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise invalid("wrong type", f"a value is not as in this format ({reason})") from None


PUBLIC_FORMATS: dict[str, PublicFormat] = {}
"""The formats by name, in the order in which they are tried."""


def _public(
    name: str,
    needs: str = "",
    key: Callable[[Record], Hashable] | None = None,
    holds: Callable[[Record], bool] = lambda _: True,
) -> Callable[[Convert], Convert]:
    """Add the format that a function converts to ``PUBLIC_FORMATS``."""

    def add(convert: Convert) -> Convert:
        columns, assumed = tuple(filter(None, needs.split(", "))), " ".join((convert.__doc__ or "").split())
        PUBLIC_FORMATS[name] = PublicFormat(name, columns, assumed, convert, key, holds)
        return convert

    return add


# --- values -----------------------------------------------------------------------------------------------------------


def invalid(kind: str, problem: str) -> RowError:
    """Return the error of a record that does not have the published layout."""
    return RowError(kind, problem, "fetch the file again, or leave the row out")


def text_in(record: Record, name: str) -> str:
    """Return a value that must be a text."""
    if not isinstance(value := record.get(name), str):
        raise invalid("missing value", f"there is no text in {name}")
    return checked_text(value, name)


def _entries(record: Record, name: str) -> list[Mapping[str, Any]]:
    """Return a list of objects; null is an empty list."""
    if name not in record:
        raise invalid("missing value", f"there is no column {name}")
    entries = parsed(record[name])
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise invalid("wrong type", f"{name} is not a list of objects")
    return entries


def _only(record: Record, names: str) -> dict[str, Any]:
    return {name: record[name] for name in names.split() if name in record}


def _votes(pair: Record, votes: Sequence[Record], bad: BadRows) -> list[Record]:
    """Return a row per vote on a pair."""
    if pair["response_a"] == pair["response_b"]:
        bad.count("identical responses")
        return []
    bad.count("pairs without a vote", not votes)
    return [{**pair, **vote} for vote in votes]


def _ranking(prompt: Any, scored: Iterable[tuple[str, Any]], bad: BadRows, **others: Any) -> list[Record]:
    """Return the ranking of one person who scored responses; equal scores tie, and a missing score is not judged."""
    numbers = [(text, read_number(parsed(score), "a score")) for text, score in scored]
    judged = [(text, score) for text, score in numbers if score == score]
    if len(judged) < 2:
        bad.count("judgments of fewer than two responses")
        return []
    levels: dict[float, list[int]] = {}
    for position, (_, score) in enumerate(judged):
        levels.setdefault(score, []).append(position)
    best_first = [levels[score] for score in sorted(levels, reverse=True)]
    return [{"prompt": prompt, "responses": [text for text, _ in judged], "ranking": best_first, **others}]


def _prompt_in(texts: Mapping[str, str]) -> str:
    """Return the text that is the prompt: by its name, else the first; a general question if there is none."""
    name = "prompt" if "prompt" in texts else guess_columns(["prompt"], texts).get("prompt", next(iter(texts), ""))
    return texts.get(name, "Which is better?")


# --- dialogues in one text --------------------------------------------------------------------------------------------

_HH = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_HELPSTEER = re.compile(r"\n?<extra_id_1>(Assistant|User)(?:\n|$)")


def _turns(text: str, marker: re.Pattern[str]) -> PromptLike:
    """Return a dialogue in one text as messages, and any other text unchanged."""
    first, *parts = marker.split(text)
    if not parts:
        return text
    roles = ("assistant" if role == "Assistant" else "user" for role in parts[::2])
    messages = [Message(role, content) for role, content in zip(roles, parts[1::2], strict=True)]
    if not messages[-1].content.strip():  # the turn that the responses are
        messages.pop()
    return (Message("user", first), *messages) if first.strip() else tuple(messages)


def _is_hh(record: Record) -> bool:
    return record.get("prompt") is None and _HH.search(str(record["chosen"])) is not None


@_public("Anthropic HH", "chosen, rejected", holds=_is_hh)
def _hh(record: Record, _: BadRows) -> Iterable[Record]:
    """The common beginning of both dialogues is the prompt; the rest are the responses."""
    yield {**record, **{side: _turns(text_in(record, side), _HH) for side in ("chosen", "rejected")}}


# --- pairs with votes -------------------------------------------------------------------------------------------------

_MULTIPREF_VOTE = re.compile("([AB])-is-(clearly|slightly)-better|Tie")


@_public("MultiPref", "text, completion_a, completion_b, normal_worker_annotations")
def _multipref(record: Record, bad: BadRows) -> Iterable[Record]:
    """The overall_pref of each annotator is one vote; clearly and slightly count the same."""
    votes = []
    for person in _entries(record, "normal_worker_annotations") + _entries(record, "expert_worker_annotations"):
        if (vote := _MULTIPREF_VOTE.fullmatch(str(person.get("overall_pref")))) is None:
            raise invalid("unknown vote", f"overall_pref is {person.get('overall_pref')!r}")
        votes.append({"vote": vote[1] or "tie", "evaluator": person.get("evaluator")})
    sides = {f"response_{side}": text_in(record, f"completion_{side}") for side in "ab"}
    about = "comparison_id prompt_id category source subject_study highest_level_degree model_a model_b"
    return _votes({"prompt": text_in(record, "text"), **sides, **_only(record, about)}, votes, bad)


def _rated_prompt(record: Record) -> str:
    if not isinstance(parsed(record.get("helpfulness")), list | int | float | None):
        raise invalid("wrong type", "helpfulness is not a list of ratings")
    return text_in(record, "prompt")


def _ratings(record: Record) -> list[float]:
    given = parsed(record["helpfulness"])
    listed = [] if given is None else given if isinstance(given, list) else [given]
    return [read_number(rating, "helpfulness") for rating in listed]


@_public("HelpSteer2 ratings", "prompt, response, helpfulness, coherence, verbosity", key=_rated_prompt)
def _helpsteer2(records: Sequence[Record], bad: BadRows) -> Iterable[Record]:
    """The responses to a prompt are paired in the order of the rows. Ratings at the same place of both lists are one
    vote: they are taken to be of the same person.
    """
    given = [record for record in records if record.get("response") is not None]
    in_order = list({str(record): record for record in given}.values())
    bad.count("rows given twice", len(given) - len(in_order))
    bad.count("responses without a second one", len(in_order) % 2)
    splits = [record["split"] for record in records if record.get("split")]
    for pair in zip(in_order[::2], in_order[1::2], strict=False):
        ratings = [_ratings(record) for record in pair]
        if len({len(of_one) for of_one in ratings}) > 1:
            bad.count("pairs whose responses have unequally many ratings")
            continue
        sides = {f"response_{side}": text_in(record, "response") for side, record in zip("ab", pair, strict=True)}
        row = {"prompt": _turns(text_in(pair[0], "prompt"), _HELPSTEER), **sides}
        both = [(a, b) for a, b in zip(*ratings, strict=True) if a == a and b == b]
        votes = [{"vote": "a" if a > b else "b" if a < b else "tie"} for a, b in both]
        yield from _votes(row | ({"split": splits[-1]} if splits else {}), votes, bad)


NEITHER = -100
"""The strength that means "neither response is good". It is no vote, although it is below zero."""


def _signs(entries: Iterable[Record], name: str, bad: BadRows) -> list[Record]:
    """Return the votes in signed strengths: below zero for the first response."""
    given: list[Any] = [parsed(entry.get(name)) for entry in entries]
    for value in given:
        if type(value) is not int or (abs(value) > 3 and value != NEITHER):
            raise invalid("unknown vote", f"a {name} is {value!r}, not a whole number from -3 to 3")
    bad.count("votes for neither response", given.count(NEITHER))
    return [{"vote": "a" if value < 0 else "b" if value > 0 else "tie"} for value in given if value != NEITHER]


@_public("HelpSteer2 preferences", "prompt, response_1, response_2, preference_strength")
def _helpsteer2_preference(record: Record, bad: BadRows) -> Iterable[Record]:
    """The sign of each strength in all_preferences_unprocessed is one vote, else that of preference_strength."""
    everyone = "all_preferences_unprocessed"
    entries = _entries(record, everyone) if everyone in record else [{"strength": record["preference_strength"]}]
    pair = {"response_a": text_in(record, "response_1"), "response_b": text_in(record, "response_2")}
    prompt = _turns(text_in(record, "prompt"), _HELPSTEER)
    return _votes({"prompt": prompt, **pair, **_only(record, "split")}, _signs(entries, "strength", bad), bad)


@_public("HelpSteer3", "context, response1, response2, individual_preference")
def _helpsteer3(record: Record, bad: BadRows) -> Iterable[Record]:
    """The sign of each score in individual_preference is one vote."""
    pair = {"response_a": text_in(record, "response1"), "response_b": text_in(record, "response2")}
    row = {"prompt": parsed(record["context"]), **pair, **_only(record, "split domain language")}
    return _votes(row, _signs(_entries(record, "individual_preference"), "score", bad), bad)


@_public("Reddit TL;DR", "info, summaries, choice")
def _tldr(record: Record, bad: BadRows) -> Iterable[Record]:
    """Each line is one vote; labels on CNN/DM articles are left out."""
    info, choice, summaries = record.get("info"), record.get("choice"), _entries(record, "summaries")
    if not isinstance(info, Mapping) or len(summaries) != 2 or type(choice) is not int or choice not in (0, 1):
        raise invalid("wrong type", "a label must have info, two summaries and the choice 0 or 1")
    if info.get("post") is None and info.get("article") is not None:
        bad.count("labels on CNN/DM articles")
        return []
    post, title = text_in(info, "post").replace("\n\n", "\n"), info.get("title") or ""
    text = f"SUBREDDIT: r/{info.get('subreddit') or ''}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    # Posts with the same id have one prompt, even if their spacing differs between batches.
    prompt = bad.texts.setdefault(info.get("id") or text, checked_text(text, "prompt"))
    sides = {f"response_{side}": text_in(one, "text").strip() for side, one in zip("ab", summaries, strict=True)}
    columns = {"subreddit": info.get("subreddit"), **_only(record, "split batch")}
    vote = {"vote": "ab"[choice], "worker": record.get("worker")}
    return _votes({"prompt": prompt, **sides, **columns}, [vote], bad)


def _conversations(sides: Iterable[Any], vote: Any, record: Record) -> Iterable[Record]:
    messages = [read_messages(parsed(turns), "a conversation") for turns in sides]
    if (
        isinstance(turns := parsed(record.get("turn")), int) and turns > 0
    ):  # MT-Bench: votes on the first turn come with the second
        messages = [of_side[: 2 * turns] for of_side in messages]
    prompt, response_a, response_b = split_dialogues(*messages)
    columns = _only(record, "judge language turn split model_a model_b")
    yield {"prompt": prompt, "response_a": response_a, "response_b": response_b, "vote": vote, **columns}


@_public("Chatbot Arena", "conversation_a, conversation_b, winner")
def _arena(record: Record, _: BadRows) -> Iterable[Record]:
    """The common beginning is the prompt; later turns are part of the answer."""
    return _conversations((record["conversation_a"], record["conversation_b"]), record["winner"], record)


@_public("LMSYS (Kaggle)", "prompt, response_a, response_b, winner_model_a, winner_model_b")
def _kaggle(record: Record, _: BadRows) -> Iterable[Record]:
    """The common beginning is the prompt; later turns are part of the answer."""
    texts = [parsed(record[name]) for name in ("prompt", "response_a", "response_b")]
    questions, *answers = [given if isinstance(given, list) else [given] for given in texts]
    won = (side for side in "ab" if str(record[f"winner_model_{side}"]) in ("1", "1.0", "True"))
    sides = []
    for of_side in answers:
        turns = zip(questions, of_side, strict=False)
        sides.append([Message(*turn) for q, a in turns for turn in (("user", q or ""), ("assistant", a or ""))])
    return _conversations(sides, next(won, "tie"), record)


@_public("All Our Ideas", "Winner Text, Loser Text")
def _all_our_ideas(record: Record, bad: BadRows) -> Iterable[Record]:
    """Each vote prefers one idea; all ideas of a wiki survey answer one prompt, which names its number."""
    if str(record.get("Valid", "")).strip().lower() in ("false", "f", "0"):
        bad.count("votes marked as invalid")
        return
    number = record.get("Question ID", record.get("Wikisurvey ID", ""))
    prompt = record.get("prompt") or f"Which idea is better? (wiki survey {number})"
    sides = {"chosen": record["Winner Text"], "rejected": record["Loser Text"]}
    yield {"prompt": prompt, **sides, **_only(record, "split"), "session_id": record.get("Session ID")}


# --- judgments: rankings and scores of one person ---------------------------------------------------------------------


@_public("UltraFeedback", "instruction, completions")
def _ultrafeedback(record: Record, bad: BadRows) -> Iterable[Record]:
    """The overall_score of its one judge (GPT-4) ranks the completions, so each pair has one vote."""
    scored = [(text_in(one, "response"), one.get("overall_score")) for one in _entries(record, "completions")]
    return _ranking(record["instruction"], scored, bad, **_only(record, "source split"))


def _is_nectar(record: Record) -> bool:
    answers = parsed(record["answers"])
    return isinstance(answers, list) and all(isinstance(one, Mapping) and "rank" in one for one in answers)


@_public("Nectar", "prompt, answers", holds=_is_nectar)
def _nectar(record: Record, bad: BadRows) -> Iterable[Record]:
    """Rank 1 is the best answer of its one judge (GPT-4), so each pair has one vote."""
    scored = [(text_in(one, "answer"), -read_number(one.get("rank"), "rank")) for one in _entries(record, "answers")]
    return _ranking(_turns(text_in(record, "prompt"), _HH), scored, bad, **_only(record, "source split"))


def _is_prism(record: Record) -> bool:
    return "conversation_history" in record or {"turn", "user_prompt", "model_response", "score"} <= record.keys()


@_public("PRISM", "conversation_id, user_id", key=lambda record: record["conversation_id"], holds=_is_prism)
def _prism(records: Sequence[Record], bad: BadRows) -> Iterable[Record]:
    """The scores of a person rank the answers of each turn; the prompt is the conversation up to there."""
    history, before = [], list[Message]()
    if "conversation_history" in records[0]:
        history = _entries(records[0], "conversation_history")
    for one in () if history else sorted(records, key=lambda record: record["turn"]):
        history.append({"turn": one["turn"], "role": "user", "content": one["user_prompt"]})
        history.append({**one, "role": "model", "content": one["model_response"]})
    for _, of_turn in groupby(history, key=lambda entry: entry.get("turn")):
        entries = list(of_turn)
        questions = [text_in(entry, "content") for entry in entries if entry["role"] == "user"]
        before.append(Message("user", questions[0]))
        answers = [entry for entry in entries if entry["role"] != "user"]
        scored = [(text_in(answer, "content"), answer.get("score")) for answer in answers]
        prompt = before[0].content if len(before) == 1 else tuple(before)
        yield from _ranking(prompt, scored, bad, **_only(records[0], "user_id conversation_type split"))
        before += [Message("assistant", text_in(answer, "content")) for answer in answers if answer.get("if_chosen")][
            :1
        ]


# --- annotation tools -------------------------------------------------------------------------------------------------


_ARGILLA_OWN = re.compile(
    r"(id|_server_id|status|external_id)|.*([.]suggestion.*|[.]responses.*|-suggestion.*|-metadata)"
)


def _argilla_texts(record: Record) -> tuple[str, dict[str, str]]:
    """Return the prompt, and the other texts that people saw by their names."""
    given = parsed(record.get("fields", record))
    texts = {name: text for name, text in given.items() if isinstance(text, str) and not _ARGILLA_OWN.fullmatch(name)}
    prompt = _prompt_in(texts)
    return prompt, {name: text for name, text in texts.items() if text != prompt}


def _argilla_answers(record: Record) -> Iterator[tuple[str, Record]]:
    """Yield the question and each submitted answer, as {value, user_id}."""
    given: Any = {name: parsed(value) for name, value in record.items()}
    for name in [name for name in given if name.endswith(".responses")]:  # a column of values, and one of people
        people, status = given.get(f"{name}.users"), given.get(f"{name}.status")
        given[name.removesuffix(".responses")] = {"value": given[name], "user_id": people, "status": status}
    if "fields" in record:
        given = given["responses"] or {}
    if isinstance(given, list):  # version 1: the answers of each person
        answers: list[tuple[str, Record]] = [
            (name, {**one, **value}) for one in given for name, value in (one.get("values") or {}).items()
        ]
    else:
        answers = [(name, one) for name, listed in given.items() for one in _objects(listed)]
    return ((name, one) for name, one in answers if one.get("status") in (None, "submitted") and "value" in one)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a list, or of lists by key; anything else holds none."""
    if isinstance(value, Mapping) and isinstance(value.get("value"), list):
        columns = {key: listed for key, listed in value.items() if listed is not None}
        return [dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=False)]
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _argilla_ranks(value: Any) -> dict[str, Any] | None:
    """Return the place of each response that a ranking names; None for the answer to another kind of question."""
    if isinstance(value, Mapping) and "rank" in value:
        return dict(zip(value["value"], value["rank"], strict=True))
    if not isinstance(value, list):
        return None
    entries = [entry if isinstance(entry, Mapping) else {"value": entry, "rank": i} for i, entry in enumerate(value)]
    return {str(entry["value"]): entry["rank"] for entry in entries}


def _field_of(name: str, responses: Mapping[str, str]) -> str | None:
    """Return the response that a question or a rank is about: by its name, by its number, or the only one."""

    def number(text: str) -> list[str]:
        return re.findall(r"\d+", text)[-1:]

    named = [field for field in responses if field in name]
    named = named or [field for field in responses if number(name) and number(field) == number(name)]
    return max(named, key=len) if named else next(iter(responses)) if len(responses) == 1 else None


def _is_argilla(record: Record) -> bool:
    flat = any(name.endswith((".responses", "-suggestion")) for name in record)
    return flat or {"fields", "responses"} <= record.keys()


@_public("Argilla", key=lambda record: _argilla_texts(record)[0], holds=_is_argilla)
def _argilla(records: Sequence[Record], bad: BadRows) -> Iterable[Record]:
    """A ranking, or the mean of a person's ratings, ranks the text fields; one of them is the prompt, by its name or
    because it is the first.
    """
    ratings: dict[Any, dict[str, list[float]]] = {}
    for position, record in enumerate(records):
        prompt, responses = _argilla_texts(record)
        for question, answer in _argilla_answers(record):
            who, ranks = answer.get("user_id"), _argilla_ranks(parsed(answer["value"]))
            if ranks is not None:
                fields = {field: -rank for name, rank in ranks.items() if (field := _field_of(name, responses))}
                yield from _ranking(
                    prompt, [(responses[name], score) for name, score in fields.items()], bad, user_id=who
                )
            elif isinstance(answer["value"], int | float) and (field := _field_of(question, responses)):
                of_person = ratings.setdefault((who, position if who is None else None), {})
                of_person.setdefault(responses[field], []).append(answer["value"])
    for (who, _), by_text in ratings.items():
        yield from _ranking(
            prompt, [(text, float(np.mean(given))) for text, given in by_text.items()], bad, user_id=who
        )


@_public("Label Studio", "data, annotations")
def _label_studio(record: Record, bad: BadRows) -> Iterable[Record]:
    """Left and right are the two texts of a task beside its prompt, in their order; a ranked list is best first."""
    data = parsed(record["data"])
    texts = {name: text for name, text in data.items() if isinstance(text, str)}
    items = [item for listed in data.values() if isinstance(listed, list) for item in listed if "id" in item]
    by_id = {str(item["id"]): list(_only(item, "title html text body").values())[-1] for item in items}
    for annotation in _entries(record, "annotations"):
        who = annotation.get("completed_by")
        person = {"annotator_id": who.get("id") if isinstance(who, Mapping) else who}
        for result in [] if annotation.get("was_cancelled") else _entries(annotation, "result"):
            value = result.get("value") or {}
            if "selected" in value:
                named = guess_columns(["response_a", "response_b"], texts).values()
                others = {name: texts[name] for name in texts if name not in (named or list(texts)[-2:])}
                if len(texts) < 2 or (len(others) > 1 and not named):
                    raise invalid("wrong type", f"the task has {len(texts)} texts; two texts and a prompt are known")
                sides = [texts[name] for name in texts if name not in others]
                pair = {"response_a": sides[0], "response_b": sides[1]}
                yield {"prompt": _prompt_in(others), **pair, "vote": value["selected"], **person}
            elif "ranker" in value:
                lists = value["ranker"] if isinstance(value["ranker"], Mapping) else {"": value["ranker"]}
                ranked = [ids for name, ids in lists.items() if name != "_"]
                if len(ranked) != 1:
                    raise invalid("invalid ranking", f"there are {len(ranked)} ranked lists, not one")
                scored = [(by_id[str(one)], -place) for place, one in enumerate(ranked[0])]
                yield from _ranking(_prompt_in(texts), scored, bad, **person)


_POLIS_COLUMNS = ("participant", "xid", "group-id", "n-comments", "n-votes", "n-agree", "n-disagree", "prompt")


@_public("Polis", "participant, n-votes", key=lambda record: record.get("prompt"))
def _polis(records: Sequence[Record], bad: BadRows) -> Iterable[Record]:
    """Each participant ranks the statements that they saw: agree, then pass, then disagree. All statements of a
    conversation answer one prompt, its topic.
    """
    texts, topic = _polis_texts(Path(bad.file))
    names = [name for name in records[0] if name not in _POLIS_COLUMNS]
    statements = {name: texts.get(name) if name.isdigit() else name for name in names}
    statements = {name: text for name, text in statements.items() if text}
    if not statements:
        problem = "the statements have numbers and no texts"
        remedy = "keep comments.csv of the export beside the file, or name the columns by the statements"
        raise DataError(problem, file=bad.file, remedy=remedy)
    rankings = []
    for record in records:
        said: dict[str, list[str]] = {"1": [], "0": [], "-1": []}
        for name in statements:
            if (vote := record.get(name)) not in (None, ""):
                said[str(vote).removesuffix(".0")].append(name)
        rankings.append([level for level in said.values() if level])
    prompt = records[0].get("prompt") or topic or "Which statement do you agree with?"
    yield {"prompt": prompt, "responses": statements, "rankings": [ranking for ranking in rankings if ranking]}


def _polis_texts(votes: Path) -> tuple[dict[str, str], str]:
    """Return the statements by number, without those that moderators rejected, and the topic, from the files beside."""
    if not votes.is_file():
        return {}, ""
    comments, summary = (
        votes.with_name(re.sub("participants?-votes", name, votes.name)) for name in ("comments", "summary")
    )
    texts = {}
    if comments.is_file() and comments != votes:
        for _, record in file_records(comments, BadRows(str(comments))):
            if str(record.get("moderated")) != "-1":
                texts[str(record.get("comment-id"))] = text_in(record, "comment-body")
    topic = ""
    if summary.is_file() and summary != votes:
        with summary.open(encoding="utf-8", newline="") as stream:
            topic = dict(row[:2] for row in csv.reader(stream) if len(row) > 1).get("topic", "")
    return texts, topic
