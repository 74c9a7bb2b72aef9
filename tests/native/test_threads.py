"""run() leaves the interpreter free: it can be watched and cancelled, and forked beside."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_resume import _native
from tests.native.reference import CHUNK, check, content, job, run, write

pytestmark = pytest.mark.alone


def cancel_when(transfer: _native.Transfer, condition: Callable[[], bool]) -> None:
    """Runs the transfer; another thread cancels it once the condition holds. Ends only if the GIL is free."""

    def watch() -> None:
        while not condition():
            pass
        transfer.cancel()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        transfer.run()
    finally:
        watcher.join()


def test_cancel_on_the_way(folder: Path, engine: str) -> None:
    src = write(folder / "src", content(CHUNK))
    # Would take a day.
    transfer = _native.Transfer(
        [job(src, folder / "dst")], engine=engine, block_bytes=4096, bandwidth_limit=50
    )
    with pytest.raises(_native.Cancelled):
        cancel_when(transfer, lambda: transfer.progress()[0] > 0)
    done, total = transfer.progress()
    assert 0 < done < total == CHUNK
    assert (folder / "dst").exists()  # left to the caller


def test_cancel_without_a_limit(folder: Path, engine: str) -> None:
    src = write(folder / "src", content(CHUNK))
    jobs = [job(src)] * 100_000
    transfer = _native.Transfer(jobs, engine=engine, block_bytes=65536)
    with pytest.raises(_native.Cancelled):
        cancel_when(transfer, lambda: transfer.progress()[0] > 0)


def test_cancel_while_the_kernel_has_no_resources(memory: Path, engine: str) -> None:
    src = write(memory / "busy", b"x")
    _native._testing_faults([("pread", 0, errno.EAGAIN)])
    transfer = _native.Transfer([job(src)], engine=engine)
    with pytest.raises(_native.Cancelled):
        cancel_when(transfer, lambda: transfer.progress()[1] > 0)


def test_cancel_before_run_does_nothing_to_files(memory: Path) -> None:
    src = write(memory / "before", b"x")
    transfer = _native.Transfer([job(src, memory / "before-dst")])
    transfer.cancel()
    with pytest.raises(_native.Cancelled):
        transfer.run()
    assert not (memory / "before-dst").exists()


def test_cancel_afterwards_is_harmless(memory: Path) -> None:
    transfer = _native.Transfer([job(write(memory / "after", b"x"))])
    transfer.run()
    transfer.cancel()


def test_cancelled_is_an_ordinary_exception() -> None:
    assert issubclass(_native.Cancelled, Exception)
    assert not issubclass(_native.Cancelled, OSError)


def test_transfers_side_by_side(folder: Path, engine: str) -> None:
    data = content(CHUNK + 5)
    src = write(folder / "src", data)
    failures: list[BaseException] = []

    def copy(i: int) -> None:
        try:
            (result,) = run(job(src, folder / f"dst{i}"), engine=engine, block_bytes=65536)
            check(result, data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all((folder / f"dst{i}").read_bytes() == data for i in range(6))


def test_after_a_fork_the_child_has_buffers_of_its_own(memory: Path, engine: str) -> None:
    """The parent's idle buffers are not mapped in the child (MADV_DONTFORK)."""
    write(memory / "fork", content(CHUNK))
    program = (
        "import os, sys\n"
        "from nvme_resume._native import Job, Transfer\n"
        f"job = Job({str(memory / 'fork')!r})\n"
        "expected = Transfer([job], engine=sys.argv[1]).run()[0].digest\n"
        "child = os.fork()\n"
        "same = Transfer([job], engine=sys.argv[1]).run()[0].digest == expected\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "sys.exit(0 if same and os.waitpid(child, 0)[1] == 0 else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, engine]).returncode == 0


def test_a_pause_holds_requests_back_but_not_for_ever(folder: Path, engine: str) -> None:
    data = content(CHUNK)
    src = write(folder / "src", data)
    for resume_after, least, most in ((0.2, 0.2, 0.45), (None, 0.9, 5.0)):
        transfer = _native.Transfer([job(src)], engine=engine, block_bytes=CHUNK // 2, in_flight=1)  # type: ignore[arg-type]
        transfer.set_paused(True)
        if resume_after:
            threading.Timer(resume_after, lambda transfer=transfer: transfer.set_paused(False)).start()  # type: ignore[misc]
        start = time.monotonic()
        (result,) = transfer.run()
        # Without an end of the pause: two requests, half a second each.
        assert least <= time.monotonic() - start < most
        check(result, data)


def test_a_paused_transfer_can_be_cancelled(folder: Path, engine: str) -> None:
    src = write(folder / "src", content(20 * CHUNK))
    transfer = _native.Transfer([job(src)], engine=engine, block_bytes=CHUNK, in_flight=1)  # type: ignore[arg-type]
    transfer.set_paused(True)
    threading.Timer(0.1, transfer.cancel).start()
    start = time.monotonic()
    with pytest.raises(_native.Cancelled):
        transfer.run()
    assert time.monotonic() - start < 2


def test_low_priority_is_the_transfers_alone(folder: Path, engine: str) -> None:
    src = write(folder / "src", data := content(3 * CHUNK + 1))
    (result,) = run(job(src, folder / "dst"), engine=engine, low_priority=True)
    check(result, data)
    assert (folder / "dst").read_bytes() == data
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 0
