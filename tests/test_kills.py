"""kill -9 at a step of a save: the earlier ensemble is whole, and the same command ends as an undisturbed one.

``make fuzz`` tries many more moments: ``tests/fuzz/test_fuzz_kills.py``.
"""

from pathlib import Path

import pytest
from killed import KILLS, Kill, check_kill


@pytest.mark.parametrize("share", [0.8, 0.97])
@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.name)
def test_a_killed_command_loses_nothing(kill: Kill, share: float, tmp_path: Path) -> None:
    check_kill(kill, share, tmp_path)
