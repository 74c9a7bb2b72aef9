"""A node that lacks its part gets it from whoever has it; else all stop with one error."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from nvme_resume.storage import locks
from tests import harness
from tests.nodes import cases


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_any_node_may_be_lost_with_a_replica(tmp_path: Path, lost: int) -> None:
    whole = cases.saved(tmp_path, 2 + lost, {"replicas": 1})
    last = len(whole.ranks) - 1
    assert cases.ranks_in(cases.folder(tmp_path, 0)) == [0, last]
    assert cases.ranks_in(cases.folder(tmp_path, last)) == [last - 1, last]
    cases.replace_disk(tmp_path, lost)
    cases.assert_resumes(tmp_path, whole, {"replicas": 1})
    assert cases.ranks_in(cases.folder(tmp_path, lost)) == [lost]


def test_two_ranks_on_one_node(tmp_path: Path) -> None:
    """The publisher brings both parts; the node that was lost gets both back."""
    more = {"nodes": [0, 1, 1]}
    whole = cases.saved(tmp_path, 3, {"gather": "main", "replicas": 1}, **more)
    assert [cases.ranks_in(cases.folder(tmp_path, n)) for n in (0, 1)] == [[0, 1, 2]] * 2
    cases.replace_disk(tmp_path, 1)
    cases.assert_resumes(tmp_path, whole, True, **more)
    assert cases.ranks_in(cases.folder(tmp_path, 1)) == [1, 2]


def test_two_nodes_give_one_its_parts(tmp_path: Path) -> None:
    """At the same time, into a checkpoint that was not there at all."""
    more = {"nodes": [0, 1, 1, 2]}
    whole = cases.saved(tmp_path, 4, {"replicas": 2}, **more)
    assert [cases.ranks_in(cases.folder(tmp_path, n)) for n in range(3)] == [[0, 1, 2, 3]] * 3
    cases.replace_disk(tmp_path, 1)
    cases.assert_resumes(tmp_path, whole, True, **more)
    log = (tmp_path / "log-resumed.0.txt").read_text()
    assert "gets the files of ranks [1] from" in log and "gets the files of ranks [2] from" in log
    assert cases.ranks_in(cases.folder(tmp_path, 1)) == [1, 2]


def test_a_folder_that_another_job_saves_to_is_left_alone(tmp_path: Path) -> None:
    """Node 1 lacks its part, but may not write there."""
    cases.saved(tmp_path, 2, {"gather": "main"})
    cases.replace_disk(tmp_path, 1)
    theirs = cases.folder(tmp_path, 1)
    theirs.mkdir(parents=True)
    lock = locks.take_save_folder(theirs, hint="")
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": 0}
    found = harness.run(tmp_path, "refused", 2, **case, failing_loads=[{"dir": "ck"}])
    lock.close()
    for rank in found.ranks:
        (failure,) = rank["failures"]
        assert failure["type"] == "LockedError" and failure["untouched"], failure
        assert f"process {os.getpid()}" in failure["text"] and "rank 1" in failure["text"], failure
    assert not (theirs / cases.TAG).exists()


def test_latest_does_not_go_back_when_an_older_tag_is_asked_for(tmp_path: Path) -> None:
    whole = cases.saved(tmp_path, 2, {"gather": "main"}, saves=[{**cases.SAVE, "at": n} for n in (1, 2)])
    for keep in (cases.TAG, None):  # node 1 has lost the older one; then both
        node = cases.folder(tmp_path, 1)
        shutil.rmtree(node / "global_step1")
        if keep is None:
            cases.replace_disk(tmp_path, 1)
        case = {**cases.CASE, **cases.nodes(tmp_path), "until": 1}
        older = harness.run(tmp_path, "older", 2, **case, seed=3, load={"dir": "ck", "tag": "global_step1"})
        assert [r["start"] for r in older.ranks] == [1, 1]
        assert cases.ranks_in(node, "global_step1") == [1]
        assert (node / "latest").read_text() == (keep or "global_step1")
        cases.assert_resumes(tmp_path, whole, True)
        assert cases.ranks_in(node) == [1]


def test_ranks_that_moved_to_another_node_are_found(tmp_path: Path) -> None:
    whole = cases.saved(tmp_path, 2, True)
    one, two = (tmp_path / "nodes" / f"node{n}" for n in (0, 1))
    one.rename(tmp_path / "other")
    two.rename(one)
    (tmp_path / "other").rename(two)
    cases.assert_resumes(tmp_path, whole, True)
    assert [cases.ranks_in(cases.folder(tmp_path, n)) for n in (0, 1)] == [[0, 1], [0, 1]]


def test_parts_without_hashes_move_as_well(tmp_path: Path) -> None:
    """The run died after the commit: who has the part takes its hashes when it is asked for it."""
    whole = cases.saved(tmp_path, 2, {"method": "link"})
    one, two = (tmp_path / "nodes" / f"node{n}" for n in (0, 1))
    for node in (0, 1):
        for path in (cases.folder(tmp_path, node) / cases.TAG).rglob("*.seal.json"):
            path.unlink()
    one.rename(tmp_path / "other")
    two.rename(one)
    (tmp_path / "other").rename(two)
    cases.assert_resumes(tmp_path, whole, {"timeout_seconds": 20})


def test_fewer_nodes_than_before(tmp_path: Path) -> None:
    """In another world size every rank reads all parts; each node lacks one."""
    whole = cases.saved(tmp_path, 3, {"replicas": 1})
    cases.replace_disk(tmp_path, 2)
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": 3}
    found = harness.run(tmp_path, "fewer", 2, **case, seed=2, load="ck")
    assert [r["start"] for r in found.ranks] == [2, 2]
    assert [cases.ranks_in(cases.folder(tmp_path, n)) for n in (0, 1)] == [[0, 1, 2]] * 2
    first = float.fromhex(found.ranks[0]["losses"][0])
    assert abs(first - float.fromhex(whole.ranks[0]["losses"][2])) < 0.02


def test_what_nobody_has_is_one_error_that_names_it(tmp_path: Path) -> None:
    cases.saved(tmp_path, 2, True)
    cases.replace_disk(tmp_path, 1)
    failing = [{"dir": "ck", "tag": cases.TAG}, {"dir": "ck"}]
    found = harness.run(
        tmp_path, "resumed", 2, **{**cases.CASE, **cases.nodes(tmp_path), "until": 0}, failing_loads=failing
    )
    for rank in found.ranks:
        explicit, newest = rank["failures"]
        assert explicit["untouched"] and newest["untouched"]
        for failure in (explicit, newest):
            assert failure["type"] == "NoCheckpointError", failure
            assert "no node has the files of ranks [1]" in failure["text"]
            assert f"bring the disk of {socket.gethostname()}" in failure["text"]


def test_the_same_name_for_two_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    """Node 1 comes back with a folder of an earlier run, in which the tag has the same name."""
    cases.saved(tmp_path, 2, True)
    shutil.move(tmp_path / "nodes" / "node1", tmp_path / "kept")
    shutil.rmtree(tmp_path / "nodes")
    whole = cases.saved(tmp_path, 2, True)
    new = tmp_path / "nodes" / "node1"
    new.rename(tmp_path / "new")
    shutil.move(tmp_path / "kept", new)
    found = harness.run(
        tmp_path,
        "resumed",
        2,
        **{**cases.CASE, **cases.nodes(tmp_path), "until": 0},
        failing_loads=[{"dir": "ck"}],
    )
    for rank in found.ranks:
        assert "2 different checkpoints" in rank["failures"][0]["text"], rank["failures"]
    shutil.rmtree(new)
    (tmp_path / "new").rename(new)
    cases.assert_resumes(tmp_path, whole, True)
