"""Locks live as long as their process, and name it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvme_resume.errors import LockedError
from nvme_resume.storage import locks
from tests.harness import ROOT

HOLDER = (
    "import sys, time; from pathlib import Path; from nvme_resume.storage import locks\n"
    "lock = locks.take(Path(sys.argv[1]), 'x', hint='h'); print('held', flush=True); time.sleep(60)"
)


def take(path: Path) -> locks.Lock:
    return locks.take(path, "the folder", hint="use another")


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(LockedError) as caught:
            take(path)
        text = str(caught.value)
        assert f"process {other.pid} on {os.uname().nodename}" in text and "the folder belongs to" in text
        assert caught.value.exit_code == 11
        other.send_signal(signal.SIGKILL)
        other.wait()
    lock = take(path)
    assert str(os.getpid()) in locks.owner(path)
    lock.close()
    assert list(tmp_path.iterdir()) == []


def test_engines_of_one_process_share_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    one, two = take(path), take(path)
    one.close()
    one.close()  # harmless
    assert path.exists()
    two.close()
    assert not path.exists()


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    """A data loader's worker may outlive the training by seconds."""
    path = tmp_path / "a.lock"
    program = (
        "import os, sys, time; from pathlib import Path; from nvme_resume.storage import locks\n"
        "lock = locks.take(Path(sys.argv[1]), 'x', hint='h')\n"
        "if os.fork() == 0:\n    lock.close()\n    time.sleep(20)\n    os._exit(0)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=False)
    deadline = time.monotonic() + 10
    while locks.is_held(path) and time.monotonic() < deadline:  # the child may not have run yet
        time.sleep(0.05)
    take(path).close()


def test_an_unreadable_note_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "a.owner").write_text("[" * 10000)
    assert locks.owner(tmp_path / "a.lock") == "a process that left no note"
