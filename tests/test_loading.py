"""Loading models: transformers is silenced only while a model is loaded."""

import importlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pluralign.models.loading import quiet_transformers

pytestmark = pytest.mark.slow


@pytest.fixture
def settings() -> Iterator[Any]:
    """The verbosity and progress bar switches of transformers, restored after the test."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield logging
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@pytest.mark.parametrize("bars", [True, False])
def test_quiet_blocks_restore_the_settings_of_the_caller(settings: Any, bars: bool) -> None:
    settings.set_verbosity_info()
    (settings.enable_progress_bar if bars else settings.disable_progress_bar)()
    with quiet_transformers(), quiet_transformers():
        assert settings.get_verbosity() == settings.ERROR
        assert not settings.is_progress_bar_enabled()
    assert settings.get_verbosity() == settings.INFO
    assert settings.is_progress_bar_enabled() == bars


def test_quiet_blocks_that_overlap_in_two_threads_restore_the_settings(settings: Any) -> None:
    settings.set_verbosity_info()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quiet_transformers():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with quiet_transformers():
        thread.start()
        assert entered.wait(10)
    assert settings.get_verbosity() == settings.ERROR, "the other block is still open"
    leave.set()
    thread.join()
    assert settings.get_verbosity() == settings.INFO
