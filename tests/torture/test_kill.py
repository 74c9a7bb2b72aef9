"""A spread of deaths (``make torture`` has thousands), and that the torture itself can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvme_resume.storage import disk as seam
from tests.harness import ROOT
from tests.torture import evidence, scenarios
from tests.torture.kill import HALVES, OPERATIONS, READING, KillDisk, Tally, Trap
from tests.torture.points import Point, every, spread

pytestmark = pytest.mark.alone  # it keeps all cores busy by itself

POINTS = 66


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the program."""
    out = tmp_path_factory.mktemp("torture") / "report.json"
    memory = Path("/dev/shm")
    command = [sys.executable, "-m", "tests.torture.run", "--out", str(out), "--points", str(POINTS)]
    command += ["--seed", "1", "--jobs", "2", "--native", "24"]
    if os.access(memory, os.W_OK) and os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize > 2 << 30:
        command += ["--dir", str(memory)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert out.is_file(), done.stdout + done.stderr[-3000:]
    return {**json.loads(out.read_text()), "code": done.returncode, "text": done.stdout}


def test_every_death_leaves_the_newest_checkpoint(report: dict[str, Any]) -> None:
    wrong = [
        (r["scenario"], r["rank"], r["kind"], r["n"], r["when"], r["at"], r["wrong"])
        for r in report["results"]
    ]
    assert not [w for w in wrong if w[-1]], report["text"]
    assert report["code"] == 0, report["text"]


def test_enough_died_of_every_kind_in_every_scenario(report: dict[str, Any]) -> None:
    dead = [r for r in report["results"] if r["died"]]
    assert len(report["results"]) == POINTS
    assert len(dead) >= 60
    assert {r["scenario"] for r in dead} == {s.name for s in scenarios.ALL}
    assert {r["kind"] for r in dead} == {"disk", "native", "stock"}
    assert {r["loaded"] for r in dead} == {"old", "new"}


def test_harm_is_noticed(report: dict[str, Any]) -> None:
    """A torture that says "ok" to a damaged or lost checkpoint proves nothing."""
    assert [c["harm"] for c in report["controls"]] == list(evidence.HARM)
    assert all(c["died"] and not c["ok"] for c in report["controls"])


def test_every_call_of_the_seam_is_trapped() -> None:
    assert {"write", "rename", "exchange", "remove_tree", "link", "sync_folder", "names"} <= set(OPERATIONS)
    assert all(getattr(KillDisk, name) is not getattr(seam.Disk, name) for name in OPERATIONS)
    assert set(OPERATIONS) >= READING | HALVES


DYING = """
import sys
from pathlib import Path
from tests.torture.kill import KillDisk, Tally, Trap

folder, n, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
disk = KillDisk(Tally(Trap("disk", n, when), folder / "where"))
disk.write(folder / "one", b"1" * 8)
disk.write(folder / "two", b"2" * 8)
disk.rename(folder / "one", folder / "three")
"""


@pytest.mark.parametrize(
    ("n", "when", "left", "size_of_two"),
    [
        (1, "before", set(), None),
        (2, "before", {"one"}, None),
        (2, "half", {"one", "two"}, 4),
        (2, "after", {"one", "two"}, 8),
        (3, "before", {"one", "two"}, 8),
        (3, "after", {"two", "three"}, 8),
    ],
)
def test_dies_where_it_is_told(
    tmp_path: Path, n: int, when: str, left: set[str], size_of_two: int | None
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path), str(n), when], cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert {p.name for p in tmp_path.iterdir()} == left | {"where"}
    assert (tmp_path / "where").read_text().startswith("write" if n < 3 else "rename")
    if size_of_two is not None:
        assert (tmp_path / "two").stat().st_size == size_of_two


def test_half_of_a_removal_leaves_some_files(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / "tree").mkdir(exist_ok=True)
        (tmp_path / "tree" / name).touch()
    code = DYING.split("disk.write")[0] + 'disk.remove_tree(folder / "tree")'
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "1", "half"], cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "tree").iterdir()) == ["b", "d"]


def test_a_disk_that_cannot_exchange(tmp_path: Path) -> None:
    tally = Tally(None, tmp_path / "where")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert KillDisk(tally, exchanges=False).exchange(tmp_path / "a", tmp_path / "b") is False
    assert KillDisk(tally).exchange(tmp_path / "a", tmp_path / "b") is True
    assert [operation for operation, _ in tally.calls] == ["exchange", "exchange"]


def write_manifest(save_dir: Path, folder: str, name: str) -> None:
    path = save_dir / folder / "nvme_resume" / "manifest.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"body": {"checkpoint_id": name}}))


@pytest.mark.parametrize(
    ("folders", "latest", "allowed", "wrong"),
    [
        ({"t2": "old"}, "t2", {2}, 0),
        ({"t2": "old", ".tmp-t3.x": "new"}, "t2", {2}, 0),
        ({"t2": "old", "t3": "new"}, "t2", {2, 3}, 0),
        ({"t2": "old", "t3": "new"}, "t3", {3}, 0),
        ({"t2": "old"}, "t3", {2}, 1),
    ],
)
def test_what_counts_as_committed(
    tmp_path: Path, folders: dict[str, str], latest: str, allowed: set[int], wrong: int
) -> None:
    for folder, name in folders.items():
        write_manifest(tmp_path / "ck", folder, name)
    (tmp_path / "ck" / "latest").write_text(latest)
    found, problems = evidence.newest_committed(scenarios.Scenario("s"), tmp_path, tmp_path)
    assert (found, len(problems)) == (allowed, wrong)


@pytest.mark.parametrize(
    ("folders", "allowed", "wrong"),
    [
        ({"t2": "old"}, {2}, 0),
        ({"t2": "new", ".tmp-t2.x": "old"}, {3}, 0),
        ({".old-t2.x": "old", ".tmp-t2.x": "new"}, {2}, 0),
        ({".tmp-t2.x": "new"}, {2}, 1),
    ],
)
def test_what_counts_as_committed_where_a_tag_is_saved_again(
    tmp_path: Path, folders: dict[str, str], allowed: set[int], wrong: int
) -> None:
    write_manifest(tmp_path / "base" / "ck", "t2", "old")
    for folder, name in folders.items():
        write_manifest(tmp_path / "ck", folder, name)
    scenario = scenarios.Scenario("s", tag="t2")
    found, problems = evidence.newest_committed(scenario, tmp_path / "base", tmp_path)
    assert (found, len(problems)) == (allowed, wrong)


def test_leftovers_are_seen(tmp_path: Path) -> None:
    private = tmp_path / "nvme" / "zero_stage_3" / "nvme_resume"
    for name in ("a-host-17-abc", "a-host-18-abc"):
        (private / name).mkdir(parents=True)
        (private / f"{name}.lock").touch()
    (private / "rank0.lock").touch()
    (tmp_path / "ck" / "t2" / ".tmp-x").mkdir(parents=True)
    (tmp_path / "ck" / ".old-t2.x").mkdir()
    found = {line.rpartition("/")[2] for line in evidence.left_behind(tmp_path, {18})}
    assert found == {"a-host-17-abc", "a-host-17-abc.lock", ".tmp-x", ".old-t2.x"}


def test_a_spread_takes_every_kind_and_is_the_same_for_a_seed() -> None:
    counted = {
        "disk": [["write", "a"], ["read", "a"], ["rename", "a"]] * 30,
        "stock": [["save", "a"]] * 2,
    }
    points = list(every("s", 0, counted, 50))
    assert len(points) == 30 * (3 + 1 + 2) + 2 * 3 + 50
    some = spread(points, 12, seed=3)
    assert some == spread(points, 12, seed=3) != spread(points, 12, seed=4)
    assert {p.trap.kind for p in some} == {"disk", "native", "stock"}
    assert sorted(map(repr, spread(points, 10**6, seed=3))) == sorted(map(repr, points))
    assert Point("s", 0, Trap("disk", 1, "half"), "write a") in points
