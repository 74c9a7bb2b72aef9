"""The publisher of a background save: waits for all parts, and never for one that cannot come."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from nvme_resume import layout
from nvme_resume.errors import StorageError
from nvme_resume.save import _await_seals
from nvme_resume.storage.background import Background


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    (folder / layout.RECORDS).mkdir(parents=True)
    (folder / layout.seal(0)).touch()
    return folder


def wait(folder: Path, seconds: float = 30, given_up: threading.Event | None = None) -> None:
    _await_seals(folder, 2, Background(), seconds, given_up or threading.Event())


def test_the_last_seal_ends_the_wait(folder: Path) -> None:
    threading.Timer(0.2, (folder / layout.seal(1)).touch).start()
    wait(folder)


@pytest.mark.parametrize("whose", [0, 1])
def test_a_mark_ends_it_whoever_left_it(folder: Path, whose: int) -> None:
    (folder / layout.failure(whose)).touch()
    with pytest.raises(StorageError, match=rf"ranks \[{whose}\] could not copy"):
        wait(folder)


def test_so_do_a_removed_folder_and_a_rank_that_gave_up_without_a_mark(folder: Path) -> None:
    """A disk that is full or read-only takes no mark; the training's threads tell each other."""
    given_up = threading.Event()
    threading.Timer(0.2, given_up.set).start()
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"ranks \[1\]"):
        wait(folder, given_up=given_up)
    assert time.monotonic() - start < 5
    (folder / layout.seal(0)).unlink()
    (folder / layout.RECORDS).rmdir()
    folder.rmdir()
    with pytest.raises(StorageError, match="was removed"):
        wait(folder)


def test_the_timeout_names_who_is_missing(folder: Path) -> None:
    with pytest.raises(StorageError, match=r"ranks \[1\] did not complete their part within 0 s"):
        wait(folder, seconds=0.1)
