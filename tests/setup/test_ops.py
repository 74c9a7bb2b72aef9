"""Locks of builds: stale ones are found and named, living ones are left alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvme_resume import ops


def make_lock(root: Path, op: str, age: float) -> Path:
    lock = root / "py311_cpu" / op / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    past = time.time() - age
    os.utime(lock, (past, past))
    return lock


def test_only_old_locks_without_a_process_are_stale(tmp_path: Path) -> None:
    stale, young, named, inside = (
        make_lock(tmp_path, op, age) for op, age in (("a", 600), ("b", 5), ("c", 600), ("d", 600))
    )
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [
        subprocess.Popen([*sleep, f"-I{named.parent}"]),
        subprocess.Popen(sleep, cwd=inside.parent),
    ]
    try:
        time.sleep(0.5)
        assert [lock.path for lock in ops.find_stale_locks(tmp_path)] == [stale]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert {lock.path for lock in ops.find_stale_locks(tmp_path)} == {stale, named, inside}
    assert young.exists()


def test_the_warning_names_file_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = make_lock(tmp_path, "async_io", 600)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "nvme_resume"):
        ops.warn_stale_locks()
    assert str(lock) in caplog.text and "nvme_resume.ops unlock" in caplog.text
    assert ops.main(["status"]) == 1
    assert ops.main(["unlock"]) == 0
    assert not lock.exists()
    assert ops.main(["status"]) == 0
    assert ops.main(["nonsense"]) == 2
