"""Nodes in tests: processes that each say they are the first of a node, with folders of their own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from tests import harness

CASE: dict[str, Any] = {"layers": 3, "until": 4}
SAVE = {"at": 2, "dir": "ck", "wait": True}
TAG = "global_step2"


def nodes(tmp: Path) -> dict[str, Any]:
    """Each rank is a node and works below ``nodes/node<rank>``, where ``ck`` is its own."""
    return {"nodes": True, "node_local": True, "private": str(tmp / "nodes")}


def saved(tmp: Path, ranks: int, options: Any, **more: Any) -> harness.Run:
    """A run that saves at step 2 and goes on: what all others are compared with."""
    return harness.run(
        tmp, "whole", ranks, **{**CASE, **nodes(tmp), "saves": [SAVE], **more}, nvme_checkpoint=options
    )


def assert_resumes(tmp: Path, whole: harness.Run, options: Any, load: Any = "ck", **more: Any) -> None:
    """In fresh processes with another seed, every loss is the same to the last bit."""
    ranks = len(whole.ranks)
    case = {**CASE, **nodes(tmp), **more}
    found = harness.run(tmp, "resumed", ranks, **case, seed=2, load=load, nvme_checkpoint=options)
    assert [r["losses"] for r in found.ranks] == [r["losses"][2:] for r in whole.ranks]


def folder(tmp: Path, node: int) -> Path:
    """The save folder of a node."""
    return tmp / "nodes" / f"node{node}" / "ck"


def records_in(save_dir: Path, tag: str = TAG) -> list[int]:
    """The ranks whose parts are complete there."""
    return sorted(int(p.name[4:6]) for p in (save_dir / tag / "nvme_resume").glob("rank??.json"))


def ranks_in(save_dir: Path, tag: str = TAG) -> list[int]:
    """The ranks whose parts lie there, and nothing of others."""
    names = [p.relative_to(save_dir / tag).as_posix() for p in (save_dir / tag).rglob("*") if p.is_file()]
    records = {int(n[-7:-5]) for n in names if re.fullmatch(r"nvme_resume/rank\d\d\.json", n)}
    of_any = {int(m[1]) for n in names if (m := re.search(r"rank_?(\d+)[^0-9]", n))}
    assert of_any == records and any(n.endswith(".swp") for n in names), names
    return sorted(records)


def replace_disk(tmp: Path, node: int) -> None:
    """The node comes back with an empty one."""
    shutil.rmtree(tmp / "nodes" / f"node{node}")
