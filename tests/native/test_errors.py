"""What cannot be done is refused, in Python's own exception classes, before it does harm."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_resume import _native
from tests.native.reference import CHUNK, content, job, run, write


def test_public_names_are_those_of_the_stub() -> None:
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())
    declared = {
        node.target.id if isinstance(node, ast.AnnAssign) else node.name
        for node in stub.body
        if isinstance(node, ast.AnnAssign | ast.ClassDef | ast.FunctionDef)
    }
    assert {name for name in dir(_native) if not name.startswith("__")} == declared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"src": ""}, "src is empty"),
        ({"src": "a\0b"}, "null"),
        ({"src": "a", "dst": ""}, "dst is empty"),
        ({"src": "a", "src_offset": -1}, "src_offset is negative"),
        ({"src": "a", "dst_offset": -1}, "dst_offset is negative"),
        ({"src": "a", "length": -2}, "length is negative"),
        ({"src": "a", "src_offset": 2**63 - 1, "length": 1}, "63 bits"),
        ({"src": "a", "dst_offset": 2**63 - 1, "length": 1}, "63 bits"),
    ],
)
def test_impossible_jobs(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.Job(**arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"block_bytes": 0},
        {"block_bytes": 4095},
        {"block_bytes": 4096 * 3},  # neither divides a chunk nor is made of chunks
        {"block_bytes": CHUNK + 4096},
        {"block_bytes": 1 << 31},
        {"in_flight": 0},
        {"in_flight": 257},
        {"engine": "io_uring"},
        {"direct": "maybe"},
        {"bandwidth_limit": -1},
    ],
)
def test_impossible_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        _native.Transfer([], **options)


def test_wrong_types() -> None:
    with pytest.raises(TypeError):
        _native.Job(b"bytes")
    with pytest.raises(TypeError):
        _native.Transfer(["a path"])


def test_jobs_are_immutable() -> None:
    asked = _native.Job("a", "b", length=3)
    with pytest.raises(AttributeError):
        asked.length = 4
    assert repr(asked) == "Job('a', 'b', src_offset=0, dst_offset=0, length=3, truncate=True)"


def test_a_transfer_runs_once(memory: Path) -> None:
    transfer = _native.Transfer([job(write(memory / "once", b"x"))])
    transfer.run()
    with pytest.raises(RuntimeError, match="only once"):
        transfer.run()


def test_two_truncating_jobs_for_one_file() -> None:
    with pytest.raises(ValueError, match="same dst: /b"):
        _native.Transfer([_native.Job("/a", "/b"), _native.Job("/c", "/b")])


def test_missing_source_leaves_no_destination(folder: Path, engine: str) -> None:
    good = write(folder / "good", b"x")
    with pytest.raises(FileNotFoundError) as caught:
        run(job(good, folder / "dst"), job(folder / "missing", folder / "dst2"), engine=engine)
    error = caught.value
    assert (error.errno, error.filename, error.offset, error.operation) == (
        errno.ENOENT, str(folder / "missing"), 0, "open",
    )  # fmt: skip
    assert not (folder / "dst").exists()


def test_folders_and_devices_are_not_files(folder: Path) -> None:
    with pytest.raises(IsADirectoryError):
        run(job(folder))
    with pytest.raises(OSError, match="not a regular file"):
        run(job(Path("/dev/null")))


def test_source_shorter_than_asked(folder: Path, engine: str) -> None:
    src = write(folder / "src", bytes(1000))
    for range_ in ({"length": 1001}, {"src_offset": 600, "length": 401}, {"src_offset": 1001}):
        with pytest.raises(OSError, match="has 1000 bytes, shorter") as caught:
            run(job(src, folder / "dst", **range_), engine=engine)
        assert (caught.value.errno, caught.value.operation) == (errno.EIO, "read")
        assert (caught.value.filename, caught.value.offset) == (str(src), 1000)
    assert not (folder / "dst").exists()


def test_source_that_shrinks_on_the_way(folder: Path, engine: str, direct: str) -> None:
    """The plan sees the old size; a job before it in the list cuts the file, by writing to it."""
    victim = write(folder / "victim", content(3 * CHUNK))
    empty = write(folder / "empty", b"")
    cut = 2 * CHUNK + 700
    with pytest.raises(OSError, match="ended inside the range") as caught:
        run(job(victim, folder / "dst"), job(empty, victim, dst_offset=cut), engine=engine, direct=direct)
    error = caught.value
    assert (error.errno, error.operation, error.filename) == (errno.EIO, "read", str(victim))
    assert 2 * CHUNK <= error.offset <= cut


def test_direct_on_is_refused_where_it_is_not_possible(disk: Path, memory: Path, engine: str) -> None:
    on_disk, in_memory = write(disk / "on", content(9000)), write(memory / "on", content(9000))
    for asked in (
        job(in_memory),
        job(on_disk, memory / "dst"),
        job(on_disk, src_offset=7),
        job(on_disk, disk / "dst", dst_offset=7),
    ):
        with pytest.raises(OSError, match="use direct='auto'") as caught:
            run(asked, engine=engine, direct="on")
        assert (caught.value.errno, caught.value.operation) == (errno.EINVAL, "open")


def test_a_job_must_not_overwrite_its_own_source(disk: Path) -> None:
    src = write(disk / "self", content(20_000))
    (disk / "self-link").hardlink_to(src)
    for asked in (
        job(src, disk / "self-link"),
        job(src, src, dst_offset=20_000),
        job(src, src, dst_offset=100, length=101, truncate=False),
    ):
        with pytest.raises(OSError, match="its own source"):
            run(asked)
    assert src.read_bytes() == content(20_000)
    run(job(src, src, dst_offset=10_000, length=10_000, truncate=False))
    assert src.read_bytes() == content(20_000)[:10_000] * 2


@pytest.fixture
def full_up(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_no_space_is_known_before_the_first_byte(full_up: Path, memory: Path, engine: str) -> None:
    small, large = write(memory / "small", b"x"), write(memory / "large", content(2 << 20))
    transfer = _native.Transfer([job(small, full_up / "small"), job(large, full_up / "large")], engine=engine)
    with pytest.raises(OSError, match="No space left") as caught:
        transfer.run()
    error = caught.value
    assert (error.errno, error.operation, error.filename) == (
        errno.ENOSPC,
        "fallocate",
        str(full_up / "large"),
    )
    assert transfer.progress()[0] == 0


def test_no_space_while_writing(full_up: Path, memory: Path, engine: str) -> None:
    large = write(memory / "large", content(2 << 20))
    _native._testing_faults([("fallocate", 0, errno.EOPNOTSUPP)])
    with pytest.raises(OSError, match="No space left") as caught:
        run(job(large, full_up / "large"), engine=engine, block_bytes=65536)
    error = caught.value
    assert (error.errno, error.operation, error.filename) == (errno.ENOSPC, "write", str(full_up / "large"))
    assert 0 < error.offset <= 1 << 20


def open_descriptors() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir()}


def test_no_descriptor_is_left_open(disk: Path, engine: str) -> None:
    src = write(disk / "leak", content(20_000))
    before = open_descriptors()
    run(job(src, disk / "leak-dst"), engine=engine)
    for operation in ("open", "pread", "pwrite", "fdatasync", "close", "fallocate"):
        for nth in (1, 2, 3):
            _native._testing_faults([(operation, nth, errno.EIO)])
            with pytest.raises(OSError, match="Input/output error"):
                run(*[job(src, disk / f"leak-dst{i}") for i in range(3)], engine=engine)
    assert open_descriptors() == before


def test_missing_packages_are_named(tmp_path: Path) -> None:
    setup = Path(__file__).parents[2] / "setup.py"
    if not setup.exists():
        pytest.skip("runs from a source tree only")
    build = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-b", tmp_path, "-t", tmp_path],
        cwd=setup.parent, env={**os.environ, "CC": "false", "CXX": "false"}, capture_output=True, text=True,
    )  # fmt: skip
    assert build.returncode != 0
    assert "apt-get install libaio-dev libxxhash-dev g++" in build.stderr.splitlines()[-1]
