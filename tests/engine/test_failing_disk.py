"""A disk that fails at every call in turn: nothing committed is lost, nothing half is left, training goes on as ever.

One process runs one engine through many faulted saves or loads (``tests.engine.faulty``); its losses must be those of
a run that nobody disturbed.  The default tests take some of the calls, ``torture`` all.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness

CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CASE = {"layers": 2, "sub_group_size": 300_000}
STEPS = {"some": 60, "torture": 450}  # more than any test trains

# The native copier's calls: operation, which of them, errno.
NATIVE = [
    ["open", 1, errno.EIO],
    ["open", 3, errno.ENOSPC],
    ["close", 1, errno.EIO],
    ["close", 4, errno.ENOSPC],
    ["fstat", 1, errno.EIO],
    ["pread", 1, errno.EIO],
    ["pread", 2, errno.EIO],
    ["pwrite", 1, errno.ENOSPC],
    ["pwrite", 3, errno.EDQUOT],
    ["fallocate", 1, errno.ENOSPC],
    ["fallocate", 3, errno.EDQUOT],
    ["ftruncate", 1, errno.EROFS],
    ["fdatasync", 1, errno.EIO],
    ["fdatasync", 3, errno.ENOSPC],
    ["io_setup", 1, errno.ENOMEM],
    ["io_submit", 1, errno.EIO],
    ["io_getevents", 1, errno.EIO],
    ["io_destroy", 1, errno.EIO],
]
DIRECT = {"method": "direct"}
IN_BACKGROUND = {"method": "direct", "async": True}
BEFORE = {"seal": "before_commit"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 MB: a save asks for 64 MB beside the 14 of a checkpoint."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160m", "none", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount tmpfs: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of plain DeepSpeed."""
    return losses_of(tmp_path_factory.mktemp("undisturbed"), STEPS["some"])


@pytest.fixture(scope="module")
def long_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return losses_of(tmp_path_factory.mktemp("undisturbed"), STEPS["torture"])


def losses_of(tmp: Path, steps: int) -> list[str]:
    losses: list[str] = harness.run(tmp, "whole", mode="stock", until=steps, **CASE).ranks[0]["losses"]
    return losses


def run(tmp: Path, **case: Any) -> dict[str, Any]:
    full = {
        **harness.DEFAULTS,
        **CASE,
        "nvme_path": str(tmp / "nvme"),
        "out": str(tmp / "out"),
        "save_dir": str(tmp / "ck"),
        "what": "save",
        "same_tag": False,
        "codes": CODES,
        "lasting": False,
        "native": [],
        "first": 1,
        "stride": 1,
        **case,
    }
    (tmp / "case.json").write_text(json.dumps(full))
    codes, log = harness.launch(tmp, "faults", 1, "tests.engine.faulty", str(tmp / "case.json"))
    assert codes == [0], log
    found: dict[str, Any] = json.loads((tmp / "out.0.json").read_text())
    return found


def code_of(fault: list[Any]) -> int:
    """Seam faults are [which call, errno, method, path], native ones [operation, which, errno]."""
    return int(fault[1] if isinstance(fault[0], int) else fault[2])


def check_saves(
    result: dict[str, Any], undisturbed: list[str], *, lasting: bool = False, in_background: bool = False
) -> None:
    for found in result["rounds"]:
        fault = found["fault"]
        failure = found["error"] or found["late"]
        if failure is not None:
            expected = "NoSpaceError" if code_of(fault) in FULL else "StorageError"
            assert failure["type"] == expected, found
            assert "/proc/self/fd" not in failure["text"], found
        assert found["error"] is None or not found["committed"] or lasting, found
        if in_background:  # else what comes late are hashes of a checkpoint that is committed
            assert found["late"] is None or not found["committed"], found
        assert found["older"] == [], found  # byte for byte
        if not lasting:
            assert found["gone"] == [], found
            assert found["changed"] == [], found  # ``latest`` included
            # Only what could not be removed is left, and only where nothing else failed.
            assert found["leftovers"] == [] or fault[2] == "remove_tree", found
        # Hashes that could not get their name stay beside it until a load of that checkpoint writes them again.
        unsealed = [n for n in found["leftovers_later"] if n.startswith(".tmp-rank00.seal.json.")]
        assert found["leftovers_later"] == (unsealed if lasting else []), found
        assert found["next"] is None and found["load"] is None and found["at_rest"] is None, found
        # A folder may be synced again before what is in it is removed; that must not become a commit.
        assert found.get("synced_again", []) == [] or failure is not None, found
    assert result["losses"] == undisturbed[: len(result["losses"])]


def failed(result: dict[str, Any]) -> int:
    return sum((r["error"] or r["late"]) is not None for r in result["rounds"])


def check_loads(result: dict[str, Any], undisturbed: list[str]) -> None:
    for found in result["rounds"]:
        assert found["checkpoint_same"], found
        if found["error"] is not None:
            assert found["error"]["type"] in ("CorruptError", "StorageError", "NoSpaceError"), found
            assert found["engine_same"], found
            assert found["swap_files_same"], found
        assert found["load"] is None and found["at_rest"] is None and found["digests_later_same"], found
    assert result["losses"] == undisturbed[: len(result["losses"])]


def test_saves_by_links(tmp_path: Path, undisturbed: list[str]) -> None:
    """Of every 13 calls one, and DeepSpeed's own files under RLIMIT_FSIZE."""
    result = run(tmp_path, first=2, stride=13, native=NATIVE[:1], limits=[0, 5000, 50_000])
    assert result["calls"] > 60 and failed(result) > 7
    check_saves(result, undisturbed)


def test_a_tag_that_exists_is_replaced_whole_or_not_at_all(tmp_path: Path, undisturbed: list[str]) -> None:
    """From the manifest on: the exchange of folders, ``latest``, the folder that goes, the seal."""
    result = run(tmp_path, same_tag=True, first=70, stride=5)
    assert failed(result) >= 3
    check_saves(result, undisturbed)


def test_copies_in_the_background_to_a_disk_that_fills(
    tmp_path: Path, undisturbed: list[str], small_disk: Path
) -> None:
    """A real one: somebody else takes the room after it was asked for, or before."""
    result = run(
        tmp_path,
        nvme_checkpoint=IN_BACKGROUND,
        save_dir=str(small_disk / "ck"),
        first=40,
        stride=9,
        native=NATIVE[2::6],
        fill=["free_bytes", "write", "preflight"],
    )
    assert any(r["late"] for r in result["rounds"])
    check_saves(result, undisturbed, in_background=True)


def test_loads(tmp_path: Path, undisturbed: list[str]) -> None:
    result = run(tmp_path, what="load", nvme_checkpoint=DIRECT, first=5, stride=13, native=NATIVE[1::6])
    assert failed_loads(result) >= 3
    check_loads(result, undisturbed)


def failed_loads(result: dict[str, Any]) -> int:
    return sum(r["error"] is not None for r in result["rounds"])


@pytest.mark.torture
@pytest.mark.parametrize("same_tag", [False, True], ids=["new", "again"])
@pytest.mark.parametrize(
    "options", [True, BEFORE, DIRECT, IN_BACKGROUND], ids=["link", "before", "direct", "async"]
)
def test_every_call_of_a_save(
    tmp_path: Path, long_undisturbed: list[str], options: Any, same_tag: bool
) -> None:
    result = run(tmp_path, nvme_checkpoint=options, same_tag=same_tag, native=NATIVE)
    assert result["calls"] > 40 and failed(result) > 20
    check_saves(result, long_undisturbed, in_background=options is IN_BACKGROUND)


@pytest.mark.torture
@pytest.mark.parametrize("same_tag", [False, True], ids=["new", "again"])
def test_a_disk_that_turns_read_only(tmp_path: Path, long_undisturbed: list[str], same_tag: bool) -> None:
    """What cannot be removed any more stays, until the next save finds a disk that works."""
    result = run(tmp_path, same_tag=same_tag, codes=[errno.EROFS], lasting=True, stride=2)
    check_saves(result, long_undisturbed, lasting=True)


@pytest.mark.torture
@pytest.mark.parametrize("options", [True, {"verify": "full"}, DIRECT], ids=["link", "full", "direct"])
def test_every_call_of_a_load(tmp_path: Path, long_undisturbed: list[str], options: Any) -> None:
    result = run(tmp_path, what="load", nvme_checkpoint=options, native=NATIVE)
    assert failed_loads(result) > 20
    check_loads(result, long_undisturbed)


@pytest.mark.torture
@pytest.mark.parametrize("options", [DIRECT, IN_BACKGROUND], ids=["waiting", "background"])
def test_a_disk_that_is_full(
    tmp_path: Path, long_undisturbed: list[str], small_disk: Path, options: Any
) -> None:
    """The checkpoint takes 14 MB."""
    result = run(
        tmp_path,
        nvme_checkpoint=options,
        save_dir=str(small_disk / "ck"),
        stride=0,
        fill=["free_bytes", "make_folder", "write", "sync_folder", "preflight"],
    )
    assert failed(result) >= 4
    check_saves(result, long_undisturbed, in_background=options is IN_BACKGROUND)


@pytest.mark.torture
@pytest.mark.parametrize("options", [True, DIRECT], ids=["link", "direct"])
def test_a_limit_on_file_sizes(tmp_path: Path, long_undisturbed: list[str], options: Any) -> None:
    result = run(tmp_path, nvme_checkpoint=options, stride=0, limits=[0, 1000, 5000, 50_000, 1 << 20])
    assert failed(result) >= 3
    check_saves(result, long_undisturbed)
