"""Injected faults: what passes is repeated, what stays is reported, and nothing is repeated that must not be.

A fault hits one call only, so a transfer that repeats the call succeeds, and one that does not fails.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvme_resume import _native
from tests.native.reference import CHUNK, check, content, job, run, write

DATA = content(2 * CHUNK + 4097)
EVERY = 0


@pytest.fixture
def src(folder: Path) -> Path:
    return write(folder / "src", DATA)


@pytest.mark.parametrize("block", [4096, 65536, CHUNK])
@pytest.mark.parametrize("operation", ["pread", "pwrite"])
@pytest.mark.parametrize("action", ["short", errno.EINTR, errno.EAGAIN])
def test_passing_trouble(src: Path, engine: str, operation: str, action: int | str, block: int) -> None:
    """Short transfers, also of the rest of a short one and of the tail; interruptions; no resources."""
    dst = src.with_name("dst")
    _native._testing_faults([(operation, nth, action) for nth in (1, 2, 3, 5, 9)])
    (result,) = run(job(src, dst), engine=engine, block_bytes=block, sync=False)
    assert dst.read_bytes() == DATA
    check(result, DATA)


@pytest.mark.parametrize("operation", ["pread", "pwrite"])
def test_every_transfer_short(src: Path, engine: str, operation: str) -> None:
    dst = src.with_name("dst")
    _native._testing_faults([(operation, EVERY, "short")])
    # Buffered, since half a sector is no progress for a direct request.
    (result,) = run(job(src, dst), engine=engine, direct="off")
    assert dst.read_bytes() == DATA
    check(result, DATA)


@pytest.mark.parametrize("operation", ["io_submit", "io_getevents"])
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_passing_trouble_with_the_aio_calls(src: Path, operation: str, code: int) -> None:
    dst = src.with_name("dst")
    _native._testing_faults([(operation, nth, code) for nth in (1, 2, 3)])
    check(run(job(src, dst), engine="libaio")[0], DATA)
    assert dst.read_bytes() == DATA


@pytest.mark.parametrize(
    ("operation", "reported"), [("open", "open"), ("fallocate", "fallocate"), ("ftruncate", "truncate")]
)
def test_interrupted_preparations(src: Path, operation: str, reported: str) -> None:
    dst = write(src.with_name("dst"), bytes(len(DATA) + 1))
    _native._testing_faults([(operation, 1, errno.EINTR)])
    check(run(job(src, dst))[0], DATA)
    _native._testing_faults([(operation, 1, errno.EIO)])
    dst.write_bytes(bytes(len(DATA) + 1))
    with pytest.raises(OSError, match="Input/output") as caught:
        run(job(src, dst))
    assert caught.value.operation == reported


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("operation", "reported"), [("pread", "read"), ("pwrite", "write")])
@pytest.mark.parametrize("nth", [1, 3])
def test_lasting_trouble_is_never_repeated(
    src: Path, engine: str, operation: str, reported: str, code: int, nth: int
) -> None:
    dst = src.with_name("dst")
    _native._testing_faults([(operation, nth, code)])
    with pytest.raises(OSError, match=r".") as caught:
        run(job(src, dst), engine=engine, block_bytes=65536)
    error = caught.value
    assert (error.errno, error.operation) == (code, reported)
    assert error.filename == str(src if operation == "pread" else dst)
    assert 0 <= error.offset < len(DATA)


def test_endless_eagain_ends(disk: Path, engine: str) -> None:
    src = write(disk / "again", b"x")
    _native._testing_faults([("pread", EVERY, errno.EAGAIN)])
    with pytest.raises(BlockingIOError):
        run(job(src), engine=engine)


def test_a_failed_fsync_is_final(src: Path, engine: str) -> None:
    dst = src.with_name("dst")
    for code in (errno.EIO, errno.ENOSPC, errno.EINTR):
        _native._testing_faults([("fdatasync", 1, code)])
        with pytest.raises(OSError, match=r".") as caught:
            run(job(src, dst), engine=engine)
        assert (caught.value.errno, caught.value.operation, caught.value.filename) == (
            code,
            "fsync",
            str(dst),
        )


def test_without_sync_there_is_none(src: Path, engine: str) -> None:
    _native._testing_faults([("fdatasync", EVERY, errno.EIO)])
    run(job(src, src.with_name("dst")), engine=engine, sync=False)
    run(job(src), engine=engine)


def test_every_file_is_synced(folder: Path, engine: str) -> None:
    jobs = [job(write(folder / f"src{i}", content(100 * i)), folder / f"dst{i}") for i in range(5)]
    _native._testing_faults([("fdatasync", 5, errno.EIO)])
    with pytest.raises(OSError, match="Input/output"):
        run(*jobs, engine=engine)
    _native._testing_faults([("fdatasync", 6, errno.EIO)])
    run(*jobs, engine=engine)


def test_kernels_that_cannot_sync_through_aio(disk: Path) -> None:
    """io_submit refuses the command: the ordinary call does it, and its failure counts."""
    src, dst = write(disk / "old-kernel", b"x"), disk / "old-kernel-dst"
    # A read, a write, then the sync.
    _native._testing_faults([("io_submit", 3, errno.EINVAL)])
    run(job(src, dst), engine="libaio")
    _native._testing_faults([("io_submit", 3, errno.EINVAL), ("fdatasync", 1, errno.EIO)])
    with pytest.raises(OSError, match="Input/output") as caught:
        run(job(src, dst), engine="libaio")
    assert caught.value.operation == "fsync"


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_failed_close_is_reported(src: Path, engine: str, nth: int) -> None:
    """Both files are closed once when the space is reserved and once at the end."""
    dst = src.with_name("dst")
    _native._testing_faults([("close", nth, errno.EIO)])
    with pytest.raises(OSError, match="Input/output") as caught:
        run(job(src, dst), engine=engine, direct="off")
    assert caught.value.operation == "close"
    assert caught.value.filename == str(dst if nth in (2, 4) else src)
    _native._testing_faults([("close", nth, errno.EINTR)])
    run(job(src, dst), engine=engine, direct="off")


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_systems_without_fallocate(src: Path, engine: str, code: int) -> None:
    dst = write(src.with_name("dst"), bytes(10))
    empty = write(src.with_name("empty"), b"")
    _native._testing_faults([("fallocate", EVERY, code)])
    run(job(src, dst, dst_offset=10), job(empty, src.with_name("sized"), dst_offset=3), engine=engine)
    assert dst.read_bytes() == bytes(10) + DATA
    assert src.with_name("sized").read_bytes() == bytes(3)


def test_no_space_to_reserve(src: Path, engine: str) -> None:
    dst = src.with_name("dst")
    _native._testing_faults([("fallocate", 2, errno.ENOSPC)])
    transfer = _native.Transfer([job(src, src.with_name("first")), job(src, dst)], engine=engine)
    with pytest.raises(OSError, match="cannot allocate") as caught:
        transfer.run()
    assert (caught.value.operation, caught.value.filename) == ("fallocate", str(dst))
    assert transfer.progress() == (0, 0)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize(
    "fault",
    [
        ("open", 3),  # the first O_DIRECT open: 1 and 2 look at the size and reserve the space
        ("open", 4),
        ("pread", 1),
        ("pwrite", 1),
        ("pwrite", 2),
    ],
    ids=lambda fault: f"{fault[0]}{fault[1]}",
)
def test_file_systems_that_refuse_direct_io(
    disk: Path, engine: str, fault: tuple[str, int], code: int
) -> None:
    src, dst = write(disk / "refuse", DATA), disk / "refuse-dst"
    _native._testing_faults([(*fault, code)])
    (result,) = run(job(src, dst), engine=engine, in_flight=1, block_bytes=CHUNK)
    assert result.direct is False
    assert dst.read_bytes() == DATA
    check(result, DATA)

    _native._testing_faults([(*fault, code)])
    with pytest.raises(OSError, match=r".") as caught:
        run(job(src, dst), engine=engine, in_flight=1, block_bytes=CHUNK, direct="on")
    assert caught.value.errno in (errno.EINVAL, code)


def test_a_buffered_refusal_is_an_error(src: Path, engine: str) -> None:
    _native._testing_faults([("pwrite", 1, errno.EINVAL)])
    with pytest.raises(OSError, match="Invalid argument"):
        run(job(src, src.with_name("dst")), engine=engine, direct="off")


@pytest.mark.parametrize("operation", ["io_setup", "io_getevents"])
def test_an_engine_that_cannot_start(src: Path, operation: str) -> None:
    _native._testing_faults([(operation, 1, errno.ENOMEM)])
    with pytest.raises(OSError, match="io_") as caught:
        run(job(src, src.with_name("dst")), engine="libaio")
    assert (caught.value.errno, caught.value.operation, caught.value.filename) == (
        errno.ENOMEM,
        "setup",
        None,
    )


def test_the_first_error_stops_the_other_jobs(folder: Path, engine: str) -> None:
    jobs = [job(write(folder / f"src{i}", content(CHUNK)), folder / f"dst{i}") for i in range(8)]
    transfer = _native.Transfer(jobs, engine=engine, in_flight=2, block_bytes=CHUNK)
    _native._testing_faults([("pwrite", 1, errno.EIO)])
    with pytest.raises(OSError, match="Input/output"):
        transfer.run()
    done, total = transfer.progress()
    assert done < total == 8 * CHUNK


@pytest.mark.parametrize(
    "fault",
    [("no_such_call", 1, 5), ("pread", -1, 5), ("open", 1, "short"), ("open", 1, "long"), ("open", 1, 0)],
)
def test_faults_that_make_no_sense(fault: tuple[str, int, int | str]) -> None:
    with pytest.raises(ValueError, match=r"."):
        _native._testing_faults([fault])


def test_kill_at_the_nth_call(memory: Path) -> None:
    write(memory / "kill", content(100_000))
    program = (
        "import sys; from nvme_resume import _native\n"
        "_native._testing_kill_at(int(sys.argv[1]))\n"
        f"_native.Transfer([_native.Job({str(memory / 'kill')!r}, {str(memory / 'killed')!r})]).run()\n"
    )
    # The source is opened, looked at and closed; the fourth call creates the destination.
    for nth, expected in [(4, -signal.SIGKILL), (1000, 0)]:
        assert subprocess.run([sys.executable, "-c", program, str(nth)]).returncode == expected
        assert (memory / "killed").exists() is (nth == 1000)
