"""Tournaments as files, and the command that decomposes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import facts_of, run

from pluralign.cli.console import show
from pluralign.cli.render.analysis import rankings_page
from pluralign.core.errors import DataError
from pluralign.measuring.rankings import Tournament, load_tournament, rankings

DRINKS: dict[str, Any] = {
    "alternatives": ["tea", "coffee", "milk"],
    "pairs": [[0, 1, 3, 1], [2, 1, 1, 1], [0, 2, 4, 1]],
}
CYCLE = {"alternatives": ["tea", "coffee", "milk"], "pairs": [[0, 1, 9, 1], [1, 2, 9, 1], [2, 0, 9, 1]]}
SHARES = np.array([[np.nan, 0.75, 0.8], [0.25, np.nan, 0.5], [0.2, 0.5, np.nan]])


KEYS = {
    *["alternatives", "pairs", "realizable", "exact", "distance", "distance_at_least", "residual", "rankings"],
    *["weights", "size_at_most", "nearest", "certificate", "in_words", "sample"],
}


def written(folder: Path, content: Any, name: str = "drinks.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_votes_become_shares_in_both_orders(tmp_path: Path) -> None:
    tournament = load_tournament(written(tmp_path, DRINKS))
    assert tournament.alternatives == ("tea", "coffee", "milk")
    np.testing.assert_allclose(tournament.shares, SHARES, atol=1e-15)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (",0.75,0.8\n0.25,,0.5\n0.2,0.5,\n", "0 1 2"),
        ("-,.75,.8\n.25,-,.5\n.2,.5,-", "0 1 2"),
        ("tea,coffee,milk\n,0.75,0.8\n,,0.5\n,,\n\n", "tea coffee milk"),
        (",tea,coffee,milk\ntea,,0.75,0.8\ncoffee,0.25,,0.5\nmilk,0.2,0.5,\n", "tea coffee milk"),
        ("drink,tea,coffee,milk\r\ntea,,,\r\ncoffee,0.25,,\r\nmilk,0.2,0.5,\r\n", "tea coffee milk"),
        ("tea,,0.75,0.8\ncoffee,0.25,,0.5\nmilk,0.2,0.5,\n", "tea coffee milk"),
        ("7,8,9\n,0.75,0.8\n0.25,,0.5\n0.2,0.5,\n", "7 8 9"),
        ("\ufefftea,coffee,milk\n,0.75,0.8\n0.25,nan,0.5\n0.2,0.5,\n", "tea coffee milk"),
    ],
)
def test_a_matrix_of_shares_is_read_with_and_without_names(tmp_path: Path, text: str, names: str) -> None:
    tournament = load_tournament(written(tmp_path, text, "shares.csv"))
    assert " ".join(tournament.alternatives) == names
    np.testing.assert_allclose(tournament.shares, SHARES, atol=1e-15)


def test_missing_pairs_are_unknown(tmp_path: Path) -> None:
    shares = load_tournament(written(tmp_path, DRINKS | {"pairs": [[0, 1, 3, 1]]})).shares
    assert (shares[0, 1], shares[1, 0]) == (0.75, 0.25)
    assert np.isnan(shares).sum() == 7


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "the file is empty"),
        ("{", "the file is not valid JSON (line 1)"),
        ("[1, 2]", "it must be a JSON object with the lists alternatives and pairs"),
        (DRINKS | {"alternatives": ["tea"]}, "the number of alternatives must be 2 to 50, not 1"),
        (DRINKS | {"alternatives": ["tea", "tea", "milk"]}, "two alternatives are named 'tea'"),
        (DRINKS | {"alternatives": ["tea", "", "milk"]}, "an alternative has no name"),
        ('{"alternatives": ["a", "\\ud800"], "pairs": [[0, 1, 1, 1]]}', "unpaired surrogate"),
        (DRINKS | {"pairs": []}, "no two alternatives are compared"),
        (DRINKS | {"pairs": [[0, 1, 1, 1], [0, 1]]}, "entry 2 of pairs: it must be a list of four numbers"),
        (DRINKS | {"pairs": [[0, 3, 1, 1]]}, "entry 1 of pairs: 0 and 3 are no two alternatives; use two different"),
        (DRINKS | {"pairs": [[0, 1, -3, 4]]}, "entry 1 of pairs: -3 and 4 are no numbers of votes"),
        (DRINKS | {"pairs": [[0, 1, 10**400, 4]]}, "are no numbers of votes"),
        (DRINKS | {"pairs": [[0, 1, 0, 0]]}, "entry 1 of pairs: 0 and 0 are no numbers of votes"),
        (DRINKS | {"pairs": [[0, 1, 1, 1], [1, 0, 1, 1]]}, "entry 2 of pairs: alternatives 1 and 0 occur twice"),
        (",0.6\n0.6,\n", "row 1: the shares 0.6 of '0' over '1' and 0.6 of the opposite do not sum to 1"),
        ("a,b\n,1.2\n-0.2,", "row 1: the share 1.2 under 'b' is not in [0, 1]"),
        ("a,b\n,x\n0.5,", "row 1: 'x' under 'b' is not a number"),
        ("a,b,c\n,0.5,0.5\n0.5,0.5\n,,0.5", "row 2: the row has 2 shares, but there are 3 rows of shares"),
        (",a,b\nb,,0.5\na,0.5,", "the names above and beside the matrix differ"),
        ("a,b,c\n,0.5\n0.5,", "there are 3 names, but 2 rows of shares"),
        (",\n,\n", "no two alternatives are compared"),
        ('a,b\n"0.5,', "the file is neither JSON nor CSV"),
    ],
)
def test_an_invalid_file_is_rejected_in_one_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    path = written(tmp_path, content, "drinks")
    with pytest.raises(DataError) as caught:
        load_tournament(path)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_binary_and_missing_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8 text"):
        load_tournament(tmp_path / "bytes")
    with pytest.raises(DataError, match="no such file"):
        load_tournament(tmp_path / "nothing")


def test_the_error_of_a_sample_counts_known_pairs_only() -> None:
    shares = np.full((4, 4), np.nan)
    shares[0, 1], shares[1, 0] = 0.75, 0.25
    sample: Any = rankings(Tournament(("a", "b", "c", "d"), shares), k=8, seed=3).sample
    share = sum(ranking.index(0) < ranking.index(1) for ranking in sample.rankings) / 8
    assert len(sample.rankings) == 8
    assert sample.error == pytest.approx((share - 0.75) ** 2)
    assert sample.expected_error == pytest.approx(0.75 * 0.25 / 8)
    assert sample.bound == 1 / 32


def page_of(tournament: Tournament, capsys: pytest.CaptureFixture[str]) -> str:
    show(rankings_page(rankings(tournament), "drinks"))
    return " ".join(capsys.readouterr().out.split())


# --- the command ------------------------------------------------------------------------------------------------------


def test_rankings_prints_one_json_object(tmp_path: Path) -> None:
    done = run("rankings", written(tmp_path, DRINKS), "--json", "--seed", "1", "--k", "4")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert set(facts) == KEYS
    assert facts["realizable"] is True
    assert facts["exact"] is True
    assert facts["distance"] == 0
    assert sum(facts["weights"]) == pytest.approx(1)
    assert facts["sample"]["k"] == 4
    for i, j, votes_i, votes_j in DRINKS["pairs"]:
        share = sum(
            weight
            for ranking, weight in zip(facts["rankings"], facts["weights"], strict=True)
            if ranking.index(i) < ranking.index(j)
        )
        assert share == pytest.approx(votes_i / (votes_i + votes_j), abs=1e-9)
        assert facts["nearest"][i][j] == pytest.approx(share, abs=1e-12)


def test_a_tournament_that_is_not_realizable_has_a_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, CYCLE)
    facts = facts_of("rankings", path)
    assert facts["realizable"] is False
    assert facts["distance"] == pytest.approx((0.7 / 3) ** 2)
    assert facts["certificate"]["pairs"] == [[0, 1], [1, 2], [2, 0]]
    assert facts["certificate"]["value"] == pytest.approx(2.7)
    assert list(facts["certificate"]) == ["pairs", "coefficients", "bound", "value", "kind"]
    assert facts["sample"] is None
    page = page_of(load_tournament(path), capsys)
    for words in (
        "Not realizable",
        "No ranking satisfies all of “tea over coffee”, “coffee over milk” and “milk over tea”",
        "sum to at most 2; here 2.7.",
        "calibration error 0.054444",
        "NP-hard (Theorem 1)",
        "tea > coffee > milk",
    ):
        assert words in page


def test_rankings_reads_standard_input() -> None:
    assert facts_of("rankings", "-", stdin=json.dumps(DRINKS))["alternatives"] == DRINKS["alternatives"]
