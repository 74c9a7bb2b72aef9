"""Which checkpoint a load takes when nobody names one, or when what ``latest`` names is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_resume import last_resumable, layout, manifest
from nvme_resume.errors import ConfigError, NoCheckpointError
from nvme_resume.manifest import Extras, FileRecord, Manifest, RankEntry, RankRecord
from nvme_resume.storage import catalog, records
from nvme_resume.storage.catalog import Entry


def make(save_dir: Path, tag: str, step: int, world_size: int = 2) -> Path:
    """A complete checkpoint without any parameter."""
    folder = save_dir / tag
    (folder / layout.RECORDS).mkdir(parents=True)
    entries = []
    for rank in range(world_size):
        model, optim = f"model{rank}.pt", f"optim{rank}.pt"
        for name in (model, optim):
            (folder / name).write_bytes(b"x" * 10)
        record = RankRecord(
            checkpoint_id=tag,
            tag=tag,
            rank=rank,
            world_size=world_size,
            optimizer="o",
            master_dtype="float32",
            optim_file=optim,
            model_file=model,
            sub_groups=(),
            files={name: FileRecord(size=10) for name in (model, optim)},
        )
        extras = Extras(checkpoint_id=tag, rank=rank, micro_steps=step)
        records.write(folder, layout.rank_record(rank), record)
        records.write(folder, layout.extras(rank), extras)
        digests = {"record": manifest.digest_of(record), "extras": manifest.digest_of(extras)}
        entries.append(RankEntry(rank=rank, host="h", **digests))
    head = Manifest(
        checkpoint_id=tag,
        tag=tag,
        global_steps=step,
        world_size=world_size,
        sealed=False,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        settings={},
        ranks=tuple(entries),
    )
    records.write(folder, layout.manifest(), head)
    (save_dir / layout.LATEST).write_text(tag)
    return folder


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    for tag, step in (("first", 9), ("second", 10), ("third", 11)):
        make(tmp_path, tag, step)
    return tmp_path


def chosen(save_dir: Path) -> str | None:
    found = last_resumable(save_dir)
    return None if found is None else found.name


def test_the_one_that_latest_names(save_dir: Path) -> None:
    assert chosen(save_dir) == "third"
    (save_dir / layout.LATEST).write_text("first\n")
    assert chosen(save_dir) == "first"


DAMAGES: dict[str, Callable[[Path], None]] = {
    "removed": shutil.rmtree,
    "a file missing": lambda folder: (folder / "model1.pt").unlink(),
    "a file cut": lambda folder: (folder / "optim0.pt").write_bytes(b"x"),
    "no manifest": lambda folder: (folder / layout.manifest()).unlink(),
    "half a manifest": lambda folder: (folder / layout.manifest()).write_text("{"),
    "a record missing": lambda folder: (folder / layout.rank_record(1)).unlink(),
    "marked incomplete": lambda folder: (folder / catalog.INCOMPLETE).touch(),
    "another tag": lambda folder: folder.joinpath(layout.manifest()).write_bytes(
        folder.parent.joinpath("first", layout.manifest()).read_bytes()
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_complete_one_when_latest_fails(save_dir: Path, name: str) -> None:
    DAMAGES[name](save_dir / "third")
    assert chosen(save_dir) == "second"
    DAMAGES[name](save_dir / "second")
    assert chosen(save_dir) == "first"


def test_newest_is_by_step_not_by_time_or_name(tmp_path: Path) -> None:
    for tag, step in (("step10", 10), ("step9", 9)):
        make(tmp_path, tag, step)
    (tmp_path / layout.LATEST).unlink()
    assert chosen(tmp_path) == "step10"


def test_nothing_there(tmp_path: Path) -> None:
    assert chosen(tmp_path) is None
    assert chosen(tmp_path / "nowhere") is None
    (tmp_path / "unrelated").mkdir()
    (tmp_path / layout.STAGING_PREFIX).mkdir()
    assert catalog.others(tmp_path) == []


def test_plain_deepspeeds_are_taken_when_latest_names_them_and_never_guessed(tmp_path: Path) -> None:
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    assert chosen(tmp_path) is None
    (tmp_path / layout.LATEST).write_text("stock")
    assert chosen(tmp_path) == "stock"


def test_latest_with_nonsense_in_it_leads_nowhere(save_dir: Path) -> None:
    (save_dir / layout.LATEST).write_text("../elsewhere")
    assert chosen(save_dir) == "third"


def test_what_this_process_is_writing_is_no_leftover(tmp_path: Path) -> None:
    """Two engines of one process save into one folder, one of them in the background."""
    for name in ("a", "b"):
        (tmp_path / layout.staging(name, "x")).mkdir()
    catalog.under_way.add(tmp_path / layout.staging("a", "x"))
    try:
        assert [p.name for p in catalog.leftovers(tmp_path)] == [layout.staging("b", "x")]
    finally:
        catalog.under_way.clear()


def test_a_named_tag_is_that_one_or_an_error(save_dir: Path) -> None:
    assert catalog.explicit(save_dir, "first") == "first"
    with pytest.raises(NoCheckpointError, match="no such checkpoint") as caught:
        catalog.explicit(save_dir, "x")
    assert "first, second, third" in str(caught.value)
    with pytest.raises(ConfigError):
        catalog.explicit(save_dir, "../x")
    (save_dir / "5").mkdir()
    assert catalog.explicit(save_dir, 5) == "5"


def test_ranks_with_disks_of_their_own_take_what_all_have() -> None:
    three, two, two_bad = Entry("3", 3, True), Entry("2", 2, True), Entry("2", 2, True, "cut")
    assert catalog.combine([[three, two], [two]]) == [
        three._replace(problem="ranks [1] do not have it"),
        two,
    ]
    assert [e.problem for e in catalog.combine([[two], [two_bad]])] == ["cut"]


def test_each_rank_looks_at_its_share(save_dir: Path) -> None:
    (save_dir / "third" / "model1.pt").unlink()
    problems = [catalog.look(save_dir, "third", catalog.share_of(rank, 2)).problem for rank in (0, 1)]
    assert problems[0] is None
    assert problems[1] is not None and "model1.pt" in problems[1]
