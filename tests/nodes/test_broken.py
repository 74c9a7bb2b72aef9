"""Cables are pulled, nodes die, disks are full: nothing is corrupt, the error names who, and a later run completes."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nvme_resume.storage import audit
from tests import harness
from tests.nodes import cases
from tests.nodes.namespaces import Hosts, hosts

TIMEOUT = 6  # seconds, of every wait for another rank


def options(where: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**where, "timeout_seconds": TIMEOUT, **more}


def when_a_file_is_half_way(save_dir: Path, then: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Watch for the files of rank 1: some have come, one has not."""

    def watch(processes: list[Any]) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            names = [p.name for p in save_dir.glob(f"{cases.TAG}/offloaded_tensors/rank01/*")]
            partial = [name for name in names if name.startswith(".tmp-")]
            if partial and len(names) > 1:  # and others have come
                then(processes)
                return
            time.sleep(0.02)
        raise AssertionError("no transfer was seen")

    return watch


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> harness.Run:
    """The run that nothing happens to."""
    return harness.run(tmp_path_factory.mktemp("expected"), "expected", 2, **cases.CASE)


@pytest.fixture
def two() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


WHERE = {"gather": {"gather": "main"}, "replica": {"replicas": 1}}


@pytest.mark.parametrize("where", ["gather", pytest.param("replica", marks=pytest.mark.matrix)])
def test_a_cable_is_pulled(tmp_path: Path, expected: harness.Run, two: Hosts, where: str) -> None:
    slow = options(WHERE[where], network_limit_mib=1.0)
    cut = when_a_file_is_half_way(cases.folder(tmp_path, 0), lambda _: two.pull(1))
    start = time.monotonic()
    found = harness.run(
        tmp_path, "cut", 2, check=False, **{**cases.CASE, **cases.nodes(tmp_path)}, saves=[cases.SAVE],
        nvme_checkpoint=slow, environments=two.environments(), meanwhile=cut,
    )  # fmt: skip
    assert time.monotonic() - start < 90
    assert [e["type"] for e in found.errors] == ["PeerError"] * 2, found.log
    other = f"rank 1 on {two.names[1]} does not answer"
    assert (
        other in (tmp_path / "log-cut.0.txt").read_text() or "[1] failed to pass" in found.errors[0]["text"]
    )
    # Committed is what was committed: each node's own part.
    assert cases.records_in(cases.folder(tmp_path, 0)) == [0] and cases.records_in(
        cases.folder(tmp_path, 1)
    ) == [1]

    two.plug(1)
    resumed = harness.run(
        tmp_path, "resumed", 2, **{**cases.CASE, **cases.nodes(tmp_path)}, seed=2, load="ck",
        saves=[{**cases.SAVE, "at": 3}], nvme_checkpoint=options(WHERE[where]), environments=two.environments(),
    )  # fmt: skip
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in expected.ranks]
    for step in (2, 3):
        audit.check(cases.folder(tmp_path, 0) / f"global_step{step}", "full")
        assert cases.ranks_in(cases.folder(tmp_path, 0), f"global_step{step}") == [0, 1]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_node_dies_while_parts_are_brought(tmp_path: Path, expected: harness.Run, victim: int) -> None:
    slow = options(WHERE["gather"], network_limit_mib=1.0)
    kill = when_a_file_is_half_way(cases.folder(tmp_path, 0), lambda p: p[victim].kill())
    found = harness.run(
        tmp_path, "killed", 2, check=False, **{**cases.CASE, **cases.nodes(tmp_path)}, saves=[cases.SAVE],
        nvme_checkpoint=slow, meanwhile=kill,
    )  # fmt: skip
    assert found.codes[victim] == -9 and found.codes[1 - victim] == 3, found.log
    assert found.errors[1 - victim]["type"] == "PeerError"
    assert cases.records_in(cases.folder(tmp_path, 0)) == [0]
    resumed = harness.run(
        tmp_path, "resumed", 2, **{**cases.CASE, **cases.nodes(tmp_path)}, seed=2, load="ck",
        saves=[{**cases.SAVE, "at": 3}], nvme_checkpoint=options(WHERE["gather"]),
    )  # fmt: skip
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in expected.ranks]
    for step in (2, 3):
        audit.check(cases.folder(tmp_path, 0) / f"global_step{step}", "full")
    # What had arrived before was not sent again.
    (line,) = [
        t for t in (tmp_path / "log-resumed.0.txt").read_text().splitlines() if "step2: " in t and "came" in t
    ]
    whole = sum(
        p.stat().st_size
        for p in (cases.folder(tmp_path, 1) / cases.TAG).rglob("*")
        if p.suffix in (".swp", ".pt")
    )
    assert float(line.split(" MiB")[0].split()[-1]) < whole / (1 << 20) - 0.9, line


LAST = 6
MANY = [{"at": n, "dir": "ck", "skip_digest": True} for n in range(1, LAST)]
ALL_WAYS = {"gather": "main", "replicas": 1, "keep_last": 2}


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> harness.Run:
    return harness.run(tmp_path_factory.mktemp("longer"), "expected", 2, **{**cases.CASE, "until": LAST})


@pytest.mark.parametrize("end", [pytest.param("wait", marks=pytest.mark.matrix), "exit"])
def test_quick_saves_beside_rotation_and_transfers(tmp_path: Path, longer: harness.Run, end: str) -> None:
    """However the program ends, no transfer stumbles over what rotation removes, and the last one resumes."""
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": LAST}
    where = {**ALL_WAYS, "timeout_seconds": 20}
    harness.run(tmp_path, "whole", 2, **case, end=end, saves=MANY, nvme_checkpoint=where)
    found = harness.run(tmp_path, "resumed", 2, **case, seed=2, load="ck", nvme_checkpoint=where)
    assert [r["losses"] for r in found.ranks] == [r["losses"][LAST - 1 :] for r in longer.ranks]


@pytest.mark.matrix
@pytest.mark.parametrize("turn", range(8))
def test_a_node_dies_at_any_moment(tmp_path: Path, longer: harness.Run, turn: int) -> None:
    """While saves, transfers and rotation follow each other closely."""
    chance = random.Random(turn)

    def kill(processes: list[Any]) -> None:
        deadline = time.monotonic() + 120
        while not (cases.folder(tmp_path, 0) / "global_step1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.random() * 3)
        processes[chance.randrange(2)].kill()

    case = {**cases.CASE, **cases.nodes(tmp_path), "until": LAST}
    slow = options(ALL_WAYS, network_limit_mib=20.0)
    start = time.monotonic()
    harness.run(tmp_path, "whole", 2, check=False, **case, saves=MANY, nvme_checkpoint=slow, meanwhile=kill)
    assert time.monotonic() - start < 90
    last = {**cases.SAVE, "at": LAST}
    found = harness.run(
        tmp_path, "resumed", 2, **case, seed=2, load="ck", saves=[last], nvme_checkpoint=options(ALL_WAYS)
    )
    begun = found.ranks[0]["start"]
    assert begun >= 1
    assert [r["losses"] for r in found.ranks] == [r["losses"][begun:] for r in longer.ranks]
    for node in (0, 1):
        audit.check(cases.folder(tmp_path, node) / f"global_step{LAST}", "full")


@pytest.mark.parametrize("stage", [pytest.param("make_folder", marks=pytest.mark.matrix), "rename"])
def test_a_node_dies_while_it_commits(tmp_path: Path, expected: harness.Run, stage: str) -> None:
    """Then that checkpoint is none, on any node, and all go on from the one before."""
    where = options(WHERE["replica"])
    saves = [{**cases.SAVE, "at": 1}, {**cases.SAVE, "lost_rank": [1, "dies", stage]}]
    found = harness.run(
        tmp_path, "killed", 2, check=False, **{**cases.CASE, **cases.nodes(tmp_path)}, saves=saves,
        nvme_checkpoint=where,
    )  # fmt: skip
    assert found.codes[1] != 0 and found.ranks[0]["save_errors"][0]["type"] == "PeerError", found.log
    cases.replace_disk(tmp_path, 1)
    resumed = harness.run(
        tmp_path,
        "resumed",
        2,
        **{**cases.CASE, **cases.nodes(tmp_path)},
        seed=2,
        load="ck",
        nvme_checkpoint=where,
    )
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][1:] for r in expected.ranks]


@pytest.mark.parametrize("when", ["gather", "resume"])
def test_a_full_disk(
    tmp_path: Path, expected: harness.Run, small_disk: Callable[..., None], when: str
) -> None:
    """The node's own part stays; the part of another that has no room is an error that says so, on all ranks."""
    node = tmp_path / "nodes" / f"node{0 if when == 'gather' else 1}"
    wait = {**cases.SAVE, "wait": when == "resume"}
    if when == "gather":
        small_disk(node, 120)
        fill = when_a_file_is_half_way(cases.folder(tmp_path, 0), lambda _: fill_up(node / "other"))
        case = {**cases.CASE, **cases.nodes(tmp_path), "end": "wait"}
        slow = options(WHERE["gather"], network_limit_mib=1.0)
        found = harness.run(
            tmp_path, "full", 2, check=False, **case, saves=[wait], nvme_checkpoint=slow, meanwhile=fill
        )
        assert [e["type"] for e in found.errors] == ["NoSpaceError"] * 2, found.log
        assert [r["losses"] for r in found.ranks] == [r["losses"] for r in expected.ranks]  # training went on
        assert cases.records_in(cases.folder(tmp_path, 0)) == [0]
        (node / "other").unlink()
        cases.assert_resumes(tmp_path, expected, True)
        return
    cases.saved(tmp_path, 2, options(WHERE["gather"]))
    cases.replace_disk(tmp_path, 1)
    small_disk(node, 8)
    failing = [{"dir": "ck"}]
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": 0}
    found = harness.run(tmp_path, "full", 2, **case, failing_loads=failing)
    for rank in found.ranks:
        assert rank["failures"][0]["type"] == "NoSpaceError" and rank["failures"][0]["untouched"], rank[
            "failures"
        ]
    small_disk(node, 200)
    cases.assert_resumes(tmp_path, expected, True)


def test_what_could_not_be_brought_goes_with_the_next_save(tmp_path: Path) -> None:
    """The disk of the receiver fails once, in the middle of a file."""

    def break_it(_: list[Any]) -> None:
        (partial,) = cases.folder(tmp_path, 0).glob(f"{cases.TAG}/offloaded_tensors/rank01/.tmp-*")
        partial.unlink()
        partial.mkdir()

    slow = options(WHERE["gather"], network_limit_mib=2.0)
    saves = [{"at": n, "dir": "ck"} for n in (2, 3)]
    meanwhile = when_a_file_is_half_way(cases.folder(tmp_path, 0), break_it)
    found = harness.run(
        tmp_path, "whole", 2, check=False, **{**cases.CASE, **cases.nodes(tmp_path)}, saves=saves,
        nvme_checkpoint=slow, meanwhile=meanwhile,
    )  # fmt: skip
    assert [e["type"] for e in found.errors] == ["StorageError"] * 2, found.log
    for step in (2, 3):
        audit.check(cases.folder(tmp_path, 0) / f"global_step{step}", "full")
        assert cases.ranks_in(cases.folder(tmp_path, 0), f"global_step{step}") == [0, 1]


def fill_up(path: Path) -> None:
    """Somebody else takes the rest of the disk."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    """Mount a tmpfs of some MiB, or change the size of one."""
    mounted: list[Path] = []

    def mount(place: Path, mib: int) -> None:
        again = place in mounted
        place.mkdir(parents=True, exist_ok=True)
        how = f"{'remount,' if again else ''}size={mib}m"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        if not again:
            mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=False)
