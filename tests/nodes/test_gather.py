"""``"gather": "main"``: the folder of the node with rank 0 resumes the run alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.nodes import cases
from tests.storage.test_commands import nvme_resume


def test_the_master_holds_all_parts_and_resumes_alone(tmp_path: Path) -> None:
    whole = cases.saved(tmp_path, 3, {"gather": "main"})
    master = cases.folder(tmp_path, 0)
    heads = {
        (cases.folder(tmp_path, n) / cases.TAG / "nvme_resume/manifest.json").read_bytes() for n in range(3)
    }
    assert len(heads) == 1
    log = (tmp_path / "log-whole.0.txt").read_text()
    assert "holds the files of all ranks" in log, log[-3000:]
    assert nvme_resume("verify", master / cases.TAG, "--level", "full")[0] == 0
    assert [cases.ranks_in(cases.folder(tmp_path, n)) for n in range(3)] == [[0, 1, 2], [1], [2]]

    resumed = harness.run(tmp_path, "alone", 3, **cases.CASE, seed=2, load=str(master))
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in whole.ranks]

    # A node with a new disk gets its own part from the master, and only that.
    cases.replace_disk(tmp_path, 2)
    cases.assert_resumes(tmp_path, whole, {"gather": "main"})
    assert cases.ranks_in(cases.folder(tmp_path, 2)) == [2]


def test_a_tag_that_is_saved_again_while_it_is_brought(tmp_path: Path) -> None:
    """The first one's transfer ends, which is no error; the second one arrives whole."""
    slow = {"gather": "main", "network_limit_mib": 2.0}
    saves = [{"at": n, "dir": "ck", "tag": "same", "skip_digest": True} for n in (1, 2)]
    whole = cases.saved(tmp_path, 2, slow, saves=saves)
    log = "".join((tmp_path / f"log-whole.{rank}.txt").read_text() for rank in (0, 1))
    assert "removed or replaced" in log and "ERROR" not in log, log[-3000:]
    assert nvme_resume("verify", cases.folder(tmp_path, 0) / "same", "--level", "full")[0] == 0
    assert cases.ranks_in(cases.folder(tmp_path, 0), "same") == [0, 1]
    resumed = harness.run(tmp_path, "alone", 2, **cases.CASE, seed=2, load=str(cases.folder(tmp_path, 0)))
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in whole.ranks]


@pytest.fixture
def another_filesystem(tmp_path: Path) -> Iterator[Path]:
    """Who sees what is found out once a file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        if Path(made).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is only one file system")
        yield Path(made)


def test_a_shared_folder_in_between(tmp_path: Path, another_filesystem: Path) -> None:
    """What all nodes see is brought nowhere; the next save on disks of their own is."""
    shared = another_filesystem / "shared"
    saves = [
        {**cases.SAVE, "at": 1},
        {**cases.SAVE, "at": 2, "dir": str(shared)},
        {**cases.SAVE, "at": 3},
    ]
    cases.saved(tmp_path, 2, {"gather": "main"}, saves=saves)
    master = cases.folder(tmp_path, 0)
    assert [cases.ranks_in(master, f"global_step{n}") for n in (1, 3)] == [[0, 1]] * 2
    assert cases.ranks_in(shared, "global_step2") == [0, 1]
    log = (tmp_path / "log-whole.0.txt").read_text()
    assert log.count(" came from ") == 2, log[-3000:]


def test_saves_that_get_no_hashes_are_gathered_all_the_same(tmp_path: Path) -> None:
    """Hashes are far behind on both nodes: what is brought without them is hashed on the way."""
    slow = {"gather": "main", "bandwidth_limit_mib": 6.0, "timeout_seconds": 60}
    last = 12
    saves = [{"at": n, "dir": "ck", "skip_digest": True} for n in range(1, last + 1)]
    cases.saved(tmp_path, 2, slow, saves=saves, until=last)
    assert "stays without hashes" in (tmp_path / "log-whole.1.txt").read_text()
    tag = f"global_step{last}"
    assert cases.ranks_in(cases.folder(tmp_path, 0), tag) == [0, 1]
    assert nvme_resume("verify", cases.folder(tmp_path, 0) / tag, "--level", "full")[0] == 0
