"""Who shares a save folder is found out, not believed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness


def main(folders: str, out: str) -> None:
    """One rank: what it finds out about its folder."""
    import torch.distributed as dist

    from nvme_resume.peers import Peers
    from nvme_resume.places import Places

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = Path(folders.split(",")[rank])
    peers = Peers(30)
    places = Places(peers)
    for _ in range(2):
        place = places.of(folder, peers.run(lambda: places.known(folder), "look"))
    report = {"ranks": place.ranks, "publisher": place.publisher, "places": len(place.all_places)}
    Path(f"{out}.{rank}").write_text(json.dumps(report | {"left": [p.name for p in folder.iterdir()]}))
    dist.barrier()
    os._exit(0)


def places(tmp_path: Path, *names: str) -> list[dict[str, Any]]:
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    codes, log = harness.launch(
        tmp_path,
        "p",
        len(names),
        "tests.engine.test_places",
        ",".join(map(str, folders)),
        str(tmp_path / "out"),
    )
    assert codes == [0] * len(names), log
    found = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(len(names))]
    assert all(f["left"] == [] for f in found)
    return found


def test_one_publisher_for_each_folder(tmp_path: Path) -> None:
    """The harness gives every rank another LOCAL_RANK: one node, says the launcher."""
    found = places(tmp_path, "a", "b", "a", "b")
    assert [f["ranks"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["publisher"] for f in found] == [True, True, False, False]
    found = places(tmp_path, "a", "a")
    assert [f["ranks"] for f in found] == [[0, 1]] * 2 and [f["publisher"] for f in found] == [True, False]


@pytest.mark.parametrize(
    ("private", "node_local"),
    [(True, True), pytest.param(True, False, marks=pytest.mark.matrix), (False, True)],
    ids=["node disks", "node disks, flag forgotten", "shared, flag wrong"],
)
def test_two_nodes_resume_whatever_the_flag_says(tmp_path: Path, private: bool, node_local: bool) -> None:
    """With disks of their own each node commits its ranks' part; on a shared one only one process commits."""
    case = {
        "layers": 1,
        "nodes": True,
        "node_local": node_local,
        "checkpoint": "ck" if private else str(tmp_path / "ck"),
        "private": str(tmp_path / "nodes") if private else None,
    }
    harness.assert_equal_resume(tmp_path, 2, save_at=2, steps=4, **case)
    folders = [tmp_path / "nodes" / f"node{r}" / "ck" for r in (0, 1)] if private else [tmp_path / "ck"]
    for rank, folder in enumerate(folders):
        assert (folder / "latest").read_text() == "global_step2"
        names = [p.name for p in sorted((folder / "global_step2" / "nvme_resume").glob("rank*.json"))]
        ranks = {name[:6] for name in names}
        assert ranks == ({f"rank0{rank}"} if private else {"rank00", "rank01"})


if __name__ == "__main__":
    main(*sys.argv[1:])
