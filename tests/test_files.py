"""Files and folders are replaced as a whole, with the usual permissions."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pluralign.core.errors import UsageError
from pluralign.core.files import atomic_folder, atomic_write, locked


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


def test_a_write_replaces_a_file_or_folder_and_creates_its_folder(tmp_path: Path) -> None:
    path, model = tmp_path / "new" / "votes.json", tmp_path / "new" / "model"
    for text in ("first", "second"):
        with atomic_write(path) as partial:
            assert partial.parent == path.parent
            partial.write_text(text)
        with atomic_folder(model) as partial:
            (partial / text).touch()
        assert (path.read_text(), [file.name for file in model.iterdir()]) == (text, [text])
    assert sorted(path.parent.iterdir()) == [model, path]


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


# --- targets ----------------------------------------------------------------------------------------------------------


def test_a_write_goes_through_symbolic_links(tmp_path: Path) -> None:
    real, link, dangling = tmp_path / "real" / "votes.json", tmp_path / "link", tmp_path / "dangling"
    real.parent.mkdir()
    real.write_text("old")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "real" / "new.json")
    for path in (link, dangling):
        with atomic_write(path) as partial:
            assert partial.parent == real.parent, "a rename across file systems would not be atomic"
            partial.write_text("new")
        assert path.is_symlink()
        assert path.read_text() == "new"
    assert real.read_text() == "new"


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe, folder, device = tmp_path / "pipe", tmp_path / "folder", tmp_path / "device"
    os.mkfifo(pipe)
    folder.mkdir()
    (tmp_path / "to-pipe").symlink_to(pipe)
    targets = [pipe, folder, tmp_path / "to-pipe"]
    if os.geteuid() == 0:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        targets.append(device)
    before = sorted(tmp_path.iterdir())
    for target in targets:
        with pytest.raises(UsageError, match="name another file"), atomic_write(target):
            pytest.fail("nothing may be written")
        if target != folder:
            with pytest.raises(UsageError, match="is not a folder"), atomic_folder(target):
                pytest.fail("nothing may be written")
    assert sorted(tmp_path.iterdir()) == before
    assert pipe.is_fifo()


def test_a_long_name_that_the_file_system_allows_can_be_written(tmp_path: Path) -> None:
    for name in ("a" * 255, "ä" * 127):
        with atomic_write(tmp_path / name) as partial:
            partial.write_text("x")
        with atomic_folder(tmp_path / name[:-1]) as folder:
            (folder / "x").touch()
        assert (tmp_path / name).read_text() == "x"


# --- leftovers --------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from pluralign.core import files
with getattr(files, sys.argv[1])(sys.argv[2]) as partial:
    target = partial / "part" if partial.is_dir() else partial
    target.write_text("half of it, and much longer than the whole")
    if sys.argv[3] == "rename":
        rename = Path.rename
        Path.rename = lambda *paths: (rename(*paths), os.kill(os.getpid(), signal.SIGKILL))
    else:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_writer(kind: str, path: Path, moment: str = "write") -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, kind, path, moment], check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_next_write_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path, folder = tmp_path / "votes.json", tmp_path / "model"
    for _ in range(2):
        kill_writer("atomic_write", path)
        kill_writer("atomic_folder", folder)
    assert sorted(left.name for left in tmp_path.iterdir()) == [".model.partial", ".votes.json.partial"]
    with atomic_write(path) as partial:
        partial.write_text("whole")
    with atomic_folder(folder) as partial:
        assert list(partial.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == [folder, path]
    assert path.read_text() == "whole"


def test_a_folder_killed_between_the_renames_is_restored(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    kill_writer("atomic_folder", folder, "rename")
    assert not folder.exists()
    with pytest.raises(OSError, match="disk full"), atomic_folder(folder):
        raise OSError("disk full")
    assert [file.name for file in folder.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [folder]


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "votes.json"
    with atomic_write(path) as first:
        first.write_text("first")
        with atomic_write(path) as second:
            assert first != second
            second.write_text("second")
        assert path.read_text() == "second"
        assert first.read_text() == "first"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_lets_one_process_in_at_a_time(tmp_path: Path) -> None:
    script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", script, str(tmp_path / "new")]
    with locked(tmp_path / "new"):
        assert b"BlockingIOError" in subprocess.run(command, check=False, capture_output=True).stderr
    assert subprocess.run(command, check=False).returncode == 0
