"""The guard of the benchmarks fails on a ratio that is twice as bad as its reference, and not on noise."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import FOLDER, benchmark
from hypothesis import given, strategies as st

guard: Any = benchmark("guard")
BOTH = guard.Benchmark([], {"rate": "higher", "cost": "lower"})
REFERENCE = {"toy": {"rate": 1.6, "cost": 0.2}}
positive = st.floats(0.01, 100)


def verdicts(rate: float, cost: float, reference: dict[str, Any] = REFERENCE) -> list[str]:
    return [row.verdict for row in guard.compare("toy", BOTH, {"rate": rate, "cost": cost}, reference)]


@pytest.mark.parametrize(
    ("rate", "cost", "expected"),
    [
        (0.81, 0.39, ["as good", "as good"]),
        (0.79, 0.41, ["worse", "worse"]),
        (90.0, 0.001, ["as good", "as good"]),
        (0.0, 0.2, ["worse", "as good"]),
    ],
)
def test_a_ratio_is_worse_if_it_is_less_than_half_as_good_as_its_reference(
    rate: float, cost: float, expected: list[str]
) -> None:
    assert verdicts(rate, cost) == expected


def test_a_ratio_without_a_reference_is_new_and_a_missing_ratio_an_error() -> None:
    assert verdicts(0.1, 9.0, {"toy": {"cost": 0.2}}) == ["new", "worse"]
    with pytest.raises(KeyError, match="there is no cost"):
        guard.compare("toy", BOTH, {"rate": 1.0}, REFERENCE)


@given(value=positive, reference=positive)
def test_inverting_a_ratio_and_its_direction_changes_nothing(value: float, reference: float) -> None:
    inverted = guard.times_worse(1 / value, 1 / reference, "lower")
    assert guard.times_worse(value, reference, "higher") == pytest.approx(inverted)


def test_a_much_worse_ratio_exits_with_code_1_and_writes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "toy.py").write_text("""print('{"rate": 0.5, "cost": 0.2}')""")
    (tmp_path / "reference.json").write_text(json.dumps(REFERENCE))
    absent = guard.Benchmark([], {}, without="there is no data")
    monkeypatch.setattr(guard, "HERE", tmp_path)
    monkeypatch.setattr(guard, "REFERENCE", tmp_path / "reference.json")
    monkeypatch.setattr(guard, "BENCHMARKS", {"toy": BOTH, "absent": absent})
    output = tmp_path / "build" / "bench.json"
    monkeypatch.setattr(sys, "argv", ["guard.py", "-o", str(output)])
    with pytest.raises(SystemExit) as ended:
        guard.main()
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "worse" in printed
    assert "absent: skipped, there is no data" in printed
    assert json.loads(output.read_text()) == {"toy": {"rate": 0.5, "cost": 0.2}}
    monkeypatch.setattr(sys, "argv", ["guard.py", "-o", str(output), "--update"])
    with pytest.raises(SystemExit) as ended:
        guard.main()
    assert ended.value.code == 0
    assert json.loads((tmp_path / "reference.json").read_text()) == {"toy": {"rate": 0.5, "cost": 0.2}}


def test_a_failed_benchmark_is_reported_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "toy.py").write_text("""print('{"rate": 1.6, "cost": 0.2}')""")
    monkeypatch.setattr(guard, "HERE", tmp_path)
    monkeypatch.setattr(guard, "BENCHMARKS", {"broken": guard.Benchmark([], {}), "toy": BOTH})
    monkeypatch.setattr(sys, "argv", ["guard.py", "-o", str(tmp_path / "bench.json")])
    with pytest.raises(SystemExit, match="failed: broken"):
        guard.main()
    assert list(json.loads((tmp_path / "bench.json").read_text())) == ["toy"]


def test_every_reference_belongs_to_a_guarded_ratio() -> None:
    reference = json.loads((FOLDER / "reference.json").read_text())
    for name, ratios in reference.items():
        assert set(ratios) == set(guard.BENCHMARKS[name].ratios)
    assert set(guard.BENCHMARKS["speed"].ratios) <= set(benchmark("speed").MEANING)


def test_operations_count_every_product_in_a_bert(tmp_path: Path) -> None:
    width, inside, layers, lengths = 4, 6, 3, [2, 5]
    config = {"hidden_size": width, "intermediate_size": inside, "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    products = 0  # (rows, inner, columns) of each product, one multiplication and one addition per term
    for n in lengths:
        of_layer = [(n, width, width)] * 4 + [(n, width, inside), (n, inside, width), (n, width, n), (n, n, width)]
        products += layers * sum(2 * rows * inner * columns for rows, inner, columns in of_layer)
    tokens = {"input_ids": [[0] * n for n in lengths]}
    assert benchmark("speed").operations(tmp_path, lambda *_, **__: tokens, None, ["a", "b"]) == products
