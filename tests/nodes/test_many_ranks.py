"""The paper calculation of docs/nodes.md for 8, 64 and 1,024 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_resume import manifest
from nvme_resume.nodes import links
from nvme_resume.places import Place
from nvme_resume.storage import commit
from nvme_resume.storage import disk as seam
from tests.nodes import fakes

FIXED_BYTES, BYTES_A_RANK = 490, 165  # as docs/nodes.md says


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_the_manifest_grows_by_the_rank(ranks: int) -> None:
    size = len(manifest.encode(fakes.manifest(ranks)))
    assert size == pytest.approx(FIXED_BYTES + BYTES_A_RANK * ranks, rel=0.05)
    assert manifest.decode(manifest.Manifest, manifest.encode(fakes.manifest(ranks)), "x").world_size == ranks


def test_a_commit_does_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    """The publisher's calls: none is for a single rank."""
    calls = []
    for ranks in (8, 64, 1024):
        head = fakes.manifest(ranks, f"t{ranks}")
        staging = fakes.stage(tmp_path, head)
        disk = fakes.CountingDisk()
        with seam.replaced(disk):
            commit.publish(tmp_path, staging, head, save_latest=True)
        calls.append(sorted(disk.calls))
        assert (tmp_path / "latest").read_text() == head.tag
    small, middle, large = calls
    # The first finds no file ``latest`` to read before.
    assert [c for c in small if c != "read"] == [c for c in middle if c != "read"] and middle == large
    assert large.count("sync_file") + large.count("sync_folder") == 5


@pytest.mark.parametrize(("gather", "replicas"), [(True, 0), (False, 1), (True, 2)])
def test_no_node_has_more_than_a_few_links_but_the_master(gather: bool, replicas: int) -> None:
    nodes = 128
    place = Place((0,), True, tuple((n * 8, n * 8 + 1) for n in range(nodes)))
    found = links.pairs(place, gather, replicas)
    assert len(set(found)) == len(found)
    for node in range(1, nodes):
        mine = [p for p in found if node * 8 in p]
        assert len(mine) <= gather + 2 * replicas
    assert len([p for p in found if p[1] == 0]) == (nodes - 1 if gather else replicas)
    assert all(a != b for a, b in found)
