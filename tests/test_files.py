"""Files and folders are replaced as a whole, with the usual permissions."""

import os
from pathlib import Path

import pytest

from pluralign.core.files import atomic_folder, atomic_write


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "votes.json"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as partial:
            partial.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_replaces_the_file_and_creates_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "votes.json"
    for text in ("first", "second"):
        with atomic_write(path) as partial:
            assert partial.parent == path.parent
            partial.write_text(text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, file_mode: int, folder_mode: int) -> None:
    before = os.umask(umask)
    try:
        with atomic_write(tmp_path / "file") as partial:
            partial.write_text("")
        with atomic_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == file_mode
    assert (tmp_path / "folder").stat().st_mode & 0o777 == folder_mode


def test_a_failed_fill_keeps_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").touch()

    def fail() -> None:
        with atomic_folder(path) as partial:
            (partial / "half").touch()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [file.name for file in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model"
    for name in ("first", "second"):
        with atomic_folder(path) as partial:
            (partial / name).touch()
        assert [file.name for file in path.iterdir()] == [name]
    assert list(path.parent.iterdir()) == [path]
