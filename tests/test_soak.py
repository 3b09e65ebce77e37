"""The parts of benchmarks/soak.py that judge a run."""

import math

import pytest
from benchmark_modules import benchmark

soak = benchmark("soak")


@pytest.mark.parametrize(("measured", "kept"), [(0, True), (2.0, True), (2.1, False), (math.nan, False)])
def test_a_promise_is_kept_up_to_its_limit(measured: float, kept: bool) -> None:
    assert soak.Promise("growth", measured, 2.0).kept is kept


def test_the_line_of_a_request_is_found_in_the_log() -> None:
    log = "POST /v1/compare 200 3 ms\nGET /healthz 200 1 ms\nWARNING POST /v1/score 499 12 ms\n"
    assert soak.LINE.findall(log) == ["200", "499"]
