"""Persona-prompted rewards: a language model votes as each persona, and weights come from other prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from judging import Parrot
from test_remote import Reply, Request, Serve, prompt_of, says, serve  # noqa: F401

from pluralign import DataError, UsageError, evaluate, town_hall
from pluralign.measuring import personas
from pluralign.theory.simplex import weights_and_undecided

PEOPLE = (
    "nature climate planet birds wildlife clean trees rivers",
    "taxes budget debts taxpayer savings thrift spend",
    "heritage customs grandparents history tradition generations",
    "peace halfway middle compromise sides camps",
)


def test_personas_of_the_camps_predict_votes_better_than_half() -> None:
    votes = town_hall(400, seed=2).preferences
    found: Any = evaluate(personas.Personas("people", Parrot(), PEOPLE), votes, groups=[])
    assert found.subject.kind == "personas"
    assert found.subject.k == len(found.members) == 4
    assert found.subject.usage.calls == 2 * 4 * 400
    assert found.test.brier < found.baselines["constant_half"].brier
    assert found.subject.personas == PEOPLE


def test_weights_of_a_prompt_are_fitted_on_other_prompts() -> None:
    votes = town_hall(80, seed=2).preferences
    members = np.random.default_rng(0).integers(0, 2, (80, 3)).astype(float)
    share = personas.cross_fitted_share(members, votes)
    changed = np.where(votes.prompt_index == 0, 5, 0)  # other votes on prompt 0
    other = votes.from_indices(
        votes.prompts, votes.responses, votes.prompt_index, votes.a_index, votes.b_index,
        np.where(changed, changed, votes.votes_a), np.where(changed, 0, votes.votes_b),
    )  # fmt: skip
    same = personas.cross_fitted_share(members, other)
    np.testing.assert_allclose(share[votes.prompt_index == 0], same[votes.prompt_index == 0])
    assert not np.allclose(share, same)
    weights, undecided = weights_and_undecided(members, votes.prob_a)
    assert not np.allclose(share, undecided / 2 + (1 - undecided) * members @ weights)


def test_one_prompt_is_refused_and_a_limit_takes_whole_prompts() -> None:
    votes = town_hall(80, seed=2).preferences
    parrot = Parrot()
    with pytest.raises(UsageError, match="at least two prompts"):
        evaluate(personas.Personas("people", parrot, PEOPLE), votes, groups=[], limit=4)
    assert not parrot.asked, "the check comes before any call"
    found = evaluate(personas.Personas("people", Parrot(), PEOPLE[:1]), votes, groups=[], limit=24)
    assert (found.pairs, found.prompts) == (24, 3)


def test_personas_are_read_from_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "people.txt"
    path.write_text('Likes tea.\n\n{"persona": "Likes rum."}\nLikes tea.\n')
    assert personas.read_personas(str(path)) == ("Likes tea.", "Likes rum.")
    for text, problem in (('{"age": 3}\n', "no persona"), ("{\n", "not JSON"), ("", "0 personas")):
        path.write_text(text)
        with pytest.raises(DataError, match=problem):
            personas.read_personas(str(path))
    with pytest.raises(DataError, match="cannot be read"):
        personas.read_personas(str(tmp_path / "none"))


def test_a_model_writes_personas_from_prompts_and_too_few_are_an_error() -> None:
    parrot = Parrot(writes=lambda prompt: "1. A gardener who likes trees\n- A driver who likes roads\nok")
    assert personas.write_personas(parrot, 2, ["Trees?"]) == ("A gardener who likes trees", "A driver who likes roads")
    with pytest.raises(DataError, match="wrote 2 personas, not 3"):
        personas.write_personas(parrot, 3, ["Trees?"])
    with pytest.raises(UsageError, match="model"):
        personas.find_personas("personas:3", None)
    with pytest.raises(UsageError, match="from 1 to 64"):
        personas.find_personas("personas:0", Parrot())


def test_the_command_evaluates_personas_with_a_server(serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    def script(request: Request) -> Reply:
        a, b = prompt_of(request).split("Response A:")[1].split("Response B:")
        return says("A" if len(a) > len(b) else "B")

    upstream = serve(script)
    people = tmp_path / "people.txt"
    people.write_text("Likes long answers.\nLikes short answers.\n")
    name = f"personas:{people}"
    done = run("evaluate", name, "demo:80", "--model", "parrot", "--base-url", upstream.url, "--limit", "16", "--json")
    found = json.loads(done.stdout)
    assert found["pairs"] == 16
    assert found["subject"]["usage"]["calls"] == len(upstream.requests) == 64
    assert found["subject"]["personas"] == ["Likes long answers.", "Likes short answers."]
    assert "need each other" in run("evaluate", name, "demo:80").stderr
