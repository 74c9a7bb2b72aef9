"""Folders of plain DeepSpeed by global rank: whose files are whose, and what ``latest`` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError
from nvme_resume.storage import gather_stock
from nvme_resume.storage.gather import Gathered


def node(folder: Path, ranks: list[int], names: list[str], tag: str = "t1") -> Path:
    """What a node of ``ranks`` wrote; each swap file says whose it is."""
    for rank, name in zip(ranks, names, strict=True):
        swap = folder / tag / layout.SWAP / name
        swap.mkdir(parents=True)
        (swap / "0_1.tensor.swp").write_text(f"{tag} of {rank}")
        (folder / tag / layout.optim_states(rank, True)).write_text(f"{tag} optim of {rank}")
        (folder / tag / layout.model_states(rank)).write_text(f"{tag} model of {rank}")
    (folder / layout.LATEST).write_text(tag)
    (folder / "zero_to_fp32.py").write_text("script")
    return folder


def gathered(into: Path, *sources: Path, world_size: int = 4) -> Gathered:
    into.mkdir(exist_ok=True)
    tag, folders = gather_stock.find(sources, None)
    return gather_stock.gather(tag, folders, world_size, into, Options(), show=False)


def assert_whole(into: Path, world_size: int = 4, tag: str = "t1") -> None:
    for rank in range(world_size):
        swap = into / tag / layout.swap_path(rank, "0_1.tensor.swp")
        assert swap.read_text() == f"{tag} of {rank}"
        assert (into / tag / layout.model_states(rank)).read_text() == f"{tag} model of {rank}"
    assert not [p for p in into.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("first", "second"),
    [([0, 1], [2, 3]), ([0, 2], [1, 3]), ([3, 1], [0, 2])],
    ids=["in order", "in turns", "back to front"],
)
def test_local_names_become_global_ones(tmp_path: Path, first: list[int], second: list[int]) -> None:
    names = ["rank00", "rank01"]
    one, two = (node(tmp_path / str(i), sorted(r), names) for i, r in enumerate((first, second)))
    assert gathered(tmp_path / "all", one, two).moved > 0
    assert_whole(tmp_path / "all")
    assert gathered(tmp_path / "all", one, two).moved == 0
    assert gathered(tmp_path / "all", tmp_path / "all", one).moved == 0
    assert (tmp_path / "all" / "zero_to_fp32.py").exists()


def test_a_later_checkpoint_becomes_the_latest(tmp_path: Path) -> None:
    """An older one does not: DeepSpeed's ``latest`` in the sources is what people go by."""
    for tag in ("t1", "t2"):
        one = node(tmp_path / f"0{tag}", [0, 1], ["rank00", "rank01"], tag)
        two = node(tmp_path / f"1{tag}", [2, 3], ["rank00", "rank01"], tag)
        gathered(tmp_path / "all", one, two)
        assert (tmp_path / "all" / layout.LATEST).read_text() == tag
        assert_whole(tmp_path / "all", tag=tag)


def test_into_one_of_the_folders(tmp_path: Path) -> None:
    one, two = (node(tmp_path / str(i), r, ["rank00", "rank01"]) for i, r in enumerate(([0, 1], [2, 3])))
    gathered(two, one, two)
    assert_whole(two)


def test_other_content_under_the_same_names_is_refused(tmp_path: Path) -> None:
    one, two = (node(tmp_path / str(i), r, ["rank00", "rank01"]) for i, r in enumerate(([0, 1], [2, 3])))
    gathered(tmp_path / "all", one, two)
    other = node(tmp_path / "other", [2, 3], ["rank00", "rank01"])
    (other / "t1" / layout.SWAP / "rank01" / "0_1.tensor.swp").write_text("t1 of X")
    with pytest.raises(ConfigError):
        gathered(tmp_path / "all", one, other)
    with pytest.raises(ConfigError, match="different files"):
        gathered(tmp_path / "new", one, two, other)
    assert_whole(tmp_path / "all")
    assert not (tmp_path / "new" / "t1").exists()
