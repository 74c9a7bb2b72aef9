"""``keep_last`` beside slow transfers: the last whole checkpoint stays until a newer one is, and no heap of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvme_resume.storage import audit
from tests import harness
from tests.nodes import cases

WHERE = {"gather": {"gather": "main", "keep_last": 1}, "replica": {"replicas": 1, "keep_last": 2}}
SLOW = {"network_limit_mib": 1.0, "timeout_seconds": 20}


def tags(save_dir: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("global_step")) for p in save_dir.glob("global_step*"))


def quick(*at: int) -> list[dict[str, Any]]:
    return [{"at": n, "dir": "ck", "skip_digest": True} for n in at]


@pytest.mark.parametrize("where", ["gather", pytest.param("replica", marks=pytest.mark.matrix)])
def test_a_node_is_lost_while_newer_checkpoints_are_on_their_way(tmp_path: Path, where: str) -> None:
    """In the run that saved the last whole one, and in the next."""
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": 9}
    options = {**WHERE[where], "timeout_seconds": 20}
    whole = harness.run(tmp_path, "whole", 2, **{**case, "private": str(tmp_path / "other")})
    first = [{**cases.SAVE, "at": 1}]
    slow = {**options, **SLOW}
    harness.run(tmp_path, "one", 2, **{**case, "until": 1}, saves=first, nvme_checkpoint=options)
    for name, at in (("two", (2, 3, 4)), ("three", (5, 6, 7))):
        harness.run(
            tmp_path, name, 2, **{**case, "until": at[-1]}, seed=2, load="ck", saves=quick(*at), end="abrupt",
            nvme_checkpoint=slow,
        )  # fmt: skip
        assert cases.records_in(cases.folder(tmp_path, 0), "global_step1") == [0, 1], tags(
            cases.folder(tmp_path, 0)
        )
    cases.replace_disk(tmp_path, 1)
    found = harness.run(tmp_path, "last", 2, **case, seed=2, load="ck", nvme_checkpoint=options)
    start = found.ranks[0]["start"]
    assert start >= 1
    assert [r["losses"] for r in found.ranks] == [r["losses"][start:] for r in whole.ranks]


def test_a_link_that_cannot_keep_up(tmp_path: Path) -> None:
    """Some saves do not go along, which is said; the last one does when it is waited for, and the disk stays small."""
    last = 9
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": last}
    options = {**WHERE["gather"], "timeout_seconds": 60, "network_limit_mib": 3.0}
    harness.run(tmp_path, "whole", 2, **case, saves=quick(*range(1, last + 1)), nvme_checkpoint=options)
    log = (tmp_path / "log-whole.0.txt").read_text()
    assert "does not go to other nodes" in log
    for node in (0, 1):
        # The newest; those on their way when the last one was saved; the one that was everywhere by then.
        assert len(tags(cases.folder(tmp_path, node))) <= 5, tags(cases.folder(tmp_path, node))
    main = cases.folder(tmp_path, 0)
    audit.check(main / f"global_step{last}", "full")
    assert cases.records_in(main, f"global_step{last}") == [0, 1]


def test_waiting_brings_what_was_put_off_and_what_has_failed(tmp_path: Path) -> None:
    """Told once, tried again by the next wait; none says that all is well before it is."""
    last = 5
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": last}
    options = {"replicas": 1, "timeout_seconds": 8, "network_limit_mib": 2.0}
    saves = [*quick(*range(1, last)), {**quick(last)[0], "network_fails": 0, "waits": 3}]
    found = harness.run(tmp_path, "whole", 2, **case, saves=saves, nvme_checkpoint=options)
    assert "does not go to other nodes" in (tmp_path / "log-whole.0.txt").read_text()
    for rank in found.ranks:
        (error,) = rank["wait_errors"]
        assert error["type"] == "PeerError", error
    for node in (0, 1):
        audit.check(cases.folder(tmp_path, node) / f"global_step{last}", "full")
        assert cases.records_in(cases.folder(tmp_path, node), f"global_step{last}") == [0, 1]


def test_one_save_a_run(tmp_path: Path) -> None:
    """The disks do not fill, however short the runs are."""
    case = {**cases.CASE, **cases.nodes(tmp_path)}
    options = {**WHERE["gather"], "timeout_seconds": 20}
    for at in (1, 2, 3):
        load = "ck" if at > 1 else None
        harness.run(
            tmp_path, f"run{at}", 2, **{**case, "until": at}, seed=at, load=load, saves=[{**cases.SAVE, "at": at}],
            nvme_checkpoint=options,
        )  # fmt: skip
    assert [tags(cases.folder(tmp_path, node)) for node in (0, 1)] == [[2, 3]] * 2


def test_options_that_differ_between_nodes(tmp_path: Path) -> None:
    case = {**cases.CASE, **cases.nodes(tmp_path), "until": 1}
    of_ranks = [{"gather": "main", "timeout_seconds": 20}, {"replicas": 1, "timeout_seconds": 20}]
    found = harness.run(tmp_path, "whole", 2, check=False, **case, nvme_checkpoint=of_ranks)
    assert [e["type"] for e in found.errors] == ["PeerError"] * 2, found.log
    for error in found.errors:
        assert "disagree on options" in error["text"] and "rank 1" in error["text"], error
        assert "'gather': 'main'" in error["text"] and "'replicas': 1" in error["text"], error
