"""kill -9 at random steps of fit, re-fit, prune, encode and generate."""

from pathlib import Path

import pytest
from killed import KILLS, check_kill

from fuzz import cases, random_of


@pytest.mark.parametrize("case", cases(share=0.02))
def test_a_killed_command_loses_nothing(case: int, tmp_path: Path) -> None:
    check_kill(KILLS[case % len(KILLS)], float(random_of(case, "kill").random()), tmp_path)
