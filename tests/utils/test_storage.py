"""The storage layer: the same on a disk and behind a URL; complete or absent on both."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from utils.errors import UserError
from utils.storage.folder import COMMIT_FILE, Folder
from utils.storage.local import LocalFolder, compute_crc32c
from utils.storage.places import is_remote, join_path_or_url, open_folder


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path) -> Folder:
    """An empty place on a disk or in fsspec's memory."""
    if request.param == "disk":
        return open_folder(tmp_path / "store")
    return open_folder(f"memory://{uuid.uuid4().hex}/store")


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"x" * 1000)
    (folder / "b.txt").write_text("text")


def commit(folder: Folder) -> str:
    assert folder.get_size("a.bin") == 1000
    assert COMMIT_FILE not in folder.list_names()
    with folder.open_local("a.bin") as path:
        assert path.read_bytes() == b"x" * 1000
    return "whole"


def test_a_published_folder_has_its_marker(root):
    folder = root.child("one")
    assert not folder.is_there()
    assert folder.list_names() == []
    folder.publish(fill, commit)
    assert folder.is_there()
    assert folder.list_names() == [COMMIT_FILE, "a.bin", "b.txt"]
    assert folder.read_text(COMMIT_FILE) == "whole"
    assert (folder.name, folder.parent.place) == ("one", root.place)
    assert root.list_names() == ["one"]
    again = open_folder(folder.place)
    assert again.read_text("b.txt") == "text"


def test_a_part_of_a_file_is_read_by_itself(root):
    root.write_text("a.txt", "0123456789")
    assert root.read_bytes("a.txt", 3, 4) == b"3456"
    assert root.read_bytes("a.txt", 8, 4) == b"89"
    with pytest.raises(FileNotFoundError):
        root.read_bytes("b.txt", 0, 1)


@pytest.mark.parametrize("broken", ["fill", "commit"])
def test_a_failed_publication_leaves_nothing(root, broken):
    def fail(folder: object) -> str:
        raise OSError("no space left")

    steps = {"fill": fill, "commit": commit, broken: fail}
    with pytest.raises(OSError, match="no space left"):
        root.child("one").publish(steps["fill"], steps["commit"])
    assert root.list_names() == []


def test_a_publication_replaces_existing_files(root):
    folder = root.child("one")
    folder.publish(fill, commit)

    def fill_other(path: Path) -> None:
        (path / "c.txt").write_text("other")

    folder.publish(fill_other, lambda written: "second")
    assert folder.list_names() == [COMMIT_FILE, "c.txt"]
    assert root.list_names() == ["one"]


def test_a_replacement_that_fails_leaves_the_old_folder_on_a_disk(tmp_path):
    folder = LocalFolder(tmp_path / "one")
    folder.publish(fill, commit)

    def fail(written: Folder) -> str:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        folder.publish(fill, fail)
    assert folder.read_text(COMMIT_FILE) == "whole"
    assert os.listdir(tmp_path) == ["one"]  # noqa: PTH208


def test_folders_moved_aside_are_kept_but_not_listed(root):
    folder = root.child("one")
    folder.publish(fill, commit)
    folder.set_aside()
    assert COMMIT_FILE not in folder.list_names()
    aside = folder if is_remote(root.place) else root.child("aside_one")
    assert aside.read_text("b.txt") == "text"
    folder.publish(fill, commit)
    assert folder.read_text(COMMIT_FILE) == "whole"


def test_removing_a_removed_folder_again_is_no_error(root):
    folder = root.child("one")
    folder.publish(fill, commit)
    folder.remove()
    folder.remove()
    assert root.list_names() == []


def test_leftovers_of_interrupted_writes_are_removed(tmp_path):
    root = LocalFolder(tmp_path)
    for name in (".writing_a", ".deleting_b", ".old_c", ".old_d", "c", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    root.remove_leftovers()
    # What was being replaced when the program died is the only one of its name.
    assert root.list_names() == [".old_d", "c", "kept"]


def test_text_is_written_atomically(tmp_path, monkeypatch):
    root = LocalFolder(tmp_path)
    root.write_text("facts.json", "first")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("utils.storage.local.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        root.write_text("facts.json", "second")
    assert root.read_text("facts.json") == "first"
    assert root.list_names() == ["facts.json"]


def test_locations_are_joined_as_paths_or_urls():
    assert join_path_or_url("gs://bucket/runs/", "a", "b") == "gs://bucket/runs/a/b"
    assert join_path_or_url("/data/runs", "a") == Path("/data/runs/a")
    assert join_path_or_url("file:///data", "a") == Path("/data/a")
    assert not is_remote("file:///data")
    assert is_remote("gs://bucket")
    assert isinstance(open_folder("file:///data/x"), LocalFolder)


@pytest.mark.parametrize("place", ["nonsense://bucket/runs", "no_such://x"])
def test_an_unknown_protocol_is_refused_with_the_way_out(place):
    with pytest.raises(UserError, match=r"cannot be opened: .*; install the protocol's package"):
        open_folder(place)


class UnsteadyFileSystem(MemoryFileSystem):
    """Object storage whose uploads fail after so many, as networks do."""

    protocol = "unsteady"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    uploads_left = 0

    def put_file(self, *args: object, **kwargs: object) -> None:
        if type(self).uploads_left == 0:
            raise OSError("connection reset")
        type(self).uploads_left -= 1
        super().put_file(*args, **kwargs)


@pytest.mark.parametrize("uploads", [0, 1])
def test_an_interrupted_upload_is_no_complete_folder(uploads):
    fsspec.register_implementation("unsteady", UnsteadyFileSystem, clobber=True)
    folder = open_folder(f"unsteady://{uuid.uuid4().hex}/one")
    UnsteadyFileSystem.uploads_left = uploads
    with pytest.raises(OSError, match="connection reset"):
        folder.publish(fill, commit)
    assert COMMIT_FILE not in folder.list_names()
    UnsteadyFileSystem.uploads_left = 5
    folder.publish(fill, commit)
    assert folder.read_text(COMMIT_FILE) == "whole"


class ReplacingFileSystem(MemoryFileSystem):
    """Object storage to which a file is sent that another thread replaces at that moment."""

    protocol = "replacing"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    newer = b""

    def put_file(self, lpath: str, rpath: str, **kwargs: object) -> None:
        if type(self).newer:
            staged = Path(lpath + ".tmp")
            staged.write_bytes(type(self).newer)
            staged.replace(lpath)
            type(self).newer = b""
        super().put_file(lpath, rpath, **kwargs)


def test_a_file_replaced_during_upload_arrives_in_its_new_form(tmp_path):
    fsspec.register_implementation("replacing", ReplacingFileSystem, clobber=True)
    folder = open_folder(f"replacing://{uuid.uuid4().hex}/one")
    source = tmp_path / "answers.bin"
    source.write_bytes(b"older")
    ReplacingFileSystem.newer = b"newer answers"
    assert folder.put_file(source, "answers.bin") == compute_crc32c(source)
    assert folder.read_text("answers.bin") == "newer answers"
