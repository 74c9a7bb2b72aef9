"""Damaged or foreign checkpoints: one clear error that names the file, engine and swap folder untouched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_resume import manifest
from tests import harness

TAG = "global_step3"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("sound")
    harness.run(tmp, "first", until=3, saves=[{"at": 3, "dir": str(tmp / "ck")}])
    return tmp / "ck"


def swap_file(tag: Path) -> Path:
    return sorted((tag / "offloaded_tensors" / "rank00").glob("exp_avg-*.swp"))[0]


def shorten(tag: Path) -> str:
    path = swap_file(tag)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    return path.name


def flip(tag: Path) -> str:
    path = swap_file(tag)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name


def flip_optimizer_file(tag: Path) -> str:
    path = next(tag.glob("*_optim_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name


def remove(tag: Path) -> str:
    path = swap_file(tag)
    path.unlink()
    return path.name


def swap_two(tag: Path) -> str:
    one, two = sorted((tag / "offloaded_tensors" / "rank00").glob("exp_avg*.swp"))[:2]
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    return one.name


def remove_record(tag: Path) -> str:
    (tag / "nvme_resume" / "rank00.json").unlink()
    return "rank00.json"


def edit_record(tag: Path) -> str:
    path = tag / "nvme_resume" / "rank00.json"
    path.write_text(path.read_text().replace('"world_size": 1', '"world_size": 2'))
    return "rank00.json"


def lead_outside(tag: Path) -> str:
    """A record whose digests are right but whose path leaves the folder."""
    folder = tag / "nvme_resume"
    record = manifest.decode(manifest.RankRecord, (folder / "rank00.json").read_bytes(), "")
    group = record.sub_groups[0]
    tensors = tuple(t.model_copy(update={"file": "../../etc/passwd"}) for t in group.tensors)
    evil = record.model_copy(
        update={"sub_groups": (group.model_copy(update={"tensors": tensors}), *record.sub_groups[1:])}
    )
    (folder / "rank00.json").write_bytes(manifest.encode(evil))
    digest = manifest.digest_of(evil)
    head = manifest.decode(manifest.Manifest, (folder / "manifest.json").read_bytes(), "")
    entry = head.ranks[0].model_copy(update={"record": digest})
    (folder / "manifest.json").write_bytes(manifest.encode(head.model_copy(update={"ranks": (entry,)})))
    seal = manifest.decode(manifest.Seal, (folder / "rank00.seal.json").read_bytes(), "")
    (folder / "rank00.seal.json").write_bytes(
        manifest.encode(seal.model_copy(update={"record_digest": digest}))
    )
    return "outside"


def remove_manifest_and_flip(tag: Path) -> str:
    """Without a manifest it must not pass for a checkpoint of plain DeepSpeed, which has no hashes."""
    flip(tag)
    (tag / "nvme_resume" / "manifest.json").unlink()
    return "manifest is missing"


def fifo_manifest(tag: Path) -> str:
    return fifo(tag / "nvme_resume" / "manifest.json")


def fifo_optimizer_file(tag: Path) -> str:
    return fifo(next(tag.glob("*_optim_states.pt")))


def fifo(path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return path.name


def symlink(tag: Path) -> str:
    path = swap_file(tag)
    elsewhere = tag.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return path.name


DAMAGES = [
    shorten,
    flip,
    flip_optimizer_file,
    remove,
    swap_two,
    remove_record,
    edit_record,
    lead_outside,
    symlink,
    remove_manifest_and_flip,
    fifo_manifest,
    fifo_optimizer_file,
]


def test_every_damage_is_refused_by_name_and_a_sound_copy_still_loads(tmp_path: Path, sound: Path) -> None:
    """One process tries all damaged copies in turn, then the sound one: the engine was never touched."""
    loads = []
    names: list[Callable[[Path], str]] = DAMAGES
    texts = []
    for damage in names:
        folder = tmp_path / damage.__name__
        shutil.copytree(sound, folder)
        texts.append(damage(folder / TAG))
        loads.append({"dir": str(folder), "fails": True})
    (tmp_path / "empty" / TAG).mkdir(parents=True)
    loads.append({"dir": str(tmp_path / "empty"), "tag": TAG, "fails": True})
    texts.append("not a ZeRO-3 checkpoint")
    loads.append({"dir": str(sound), "tag": "nothing", "fails": True})
    texts.append("no such checkpoint")
    run = harness.run(
        tmp_path,
        "resumed",
        seed=9,
        until=6,
        load=str(sound),
        failing_loads=loads,
        nvme_checkpoint={"verify": "full"},
    )
    whole = harness.run(tmp_path, "whole", mode="stock", until=6)
    failures = run.ranks[0]["failures"]
    for load, text, failure in zip(loads, texts, failures, strict=True):
        assert failure["type"] in ("CorruptError", "NoCheckpointError"), (load, failure)
        assert text in failure["text"], (load, failure)
        assert failure["untouched"], load
    assert run.ranks[0]["losses"] == whole.ranks[0]["losses"][3:]


def test_a_load_without_a_tag_goes_back_to_the_newest_complete_one(tmp_path: Path) -> None:
    """Two ranks; of the newest a file of rank 1 is missing, so rank 0 alone would take it."""
    case = {"layers": 3, "sub_group_size": 300_000}
    folder = tmp_path / "ck"
    saves = [{"at": at, "dir": str(folder)} for at in (1, 2, 3)]
    first = harness.run(tmp_path, "first", 2, until=4, saves=saves, **case)
    next((folder / TAG / "offloaded_tensors" / "rank01").glob("exp_avg-*.swp")).unlink()
    (folder / "global_step2" / "nvme_resume" / "manifest.json").unlink()
    run = harness.run(tmp_path, "resumed", 2, seed=9, until=4, load=str(folder), **case)
    for before, after in zip(first.ranks, run.ranks, strict=True):
        assert after["start"] == 1
        assert after["losses"] == before["losses"][1:]
    said = (tmp_path / "log-resumed.0.txt").read_text()
    assert "loading global_step1; skipped: global_step3 (" in said


def test_records_are_plain_json(sound: Path) -> None:
    for path in (sound / TAG / "nvme_resume").glob("*.json"):
        assert set(json.loads(path.read_text())) == {"kind", "format", "digest", "body"}


def test_stale_swap_files_never_enter_a_checkpoint(tmp_path: Path) -> None:
    """Left-overs of another run in the swap folder stay out (stock carries them along, case C8)."""
    folder = tmp_path / "nvme-first" / "zero_stage_3" / "optimizer" / "rank0"
    folder.mkdir(parents=True)
    (folder / "exp_avg-900_901.tensor.swp").write_bytes(b"x" * 4096)
    run = harness.run(tmp_path, "first", until=2, saves=[{"at": 2, "dir": str(tmp_path / "ck")}])
    saved = sorted(
        p.name for p in (tmp_path / "ck" / "global_step2" / "offloaded_tensors" / "rank00").iterdir()
    )
    assert run.codes == [0]
    assert saved and not any("900_901" in name or "gradient" in name for name in saved)
