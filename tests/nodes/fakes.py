"""Checkpoints of many ranks that never were: what their manifest weighs and what their commit does."""

from __future__ import annotations

from pathlib import Path

from nvme_resume import layout
from nvme_resume.manifest import Manifest, RankEntry
from nvme_resume.storage import disk as seam


def manifest(ranks: int, tag: str = "global_step1000") -> Manifest:
    """As a job of eight GPUs a node writes it."""
    return Manifest(
        checkpoint_id="0123456789ab",
        tag=tag,
        global_steps=1000,
        world_size=ranks,
        sealed=False,
        created="2026-01-01T00:00:00+00:00",
        versions={"nvme_resume": "0.1.0", "deepspeed": "0.19.8", "torch": "2.13.0+cpu"},
        settings={"zero_optimization.sub_group_size": 1_000_000_000, "bf16": True, "aio.block_size": 1 << 20},
        ranks=tuple(
            RankEntry(
                rank=r, host=f"ip-10-0-{r // 8:03d}-17.internal", record=f"{r:032x}", extras=f"{r:032x}"
            )
            for r in range(ranks)
        ),
    )


def stage(save_dir: Path, head: Manifest) -> str:
    """A staging folder in which every rank has done its part."""
    name = layout.staging(head.tag, head.checkpoint_id)
    (save_dir / name / layout.RECORDS).mkdir(parents=True)
    for rank in range(head.world_size):
        for relative in (layout.rank_record(rank), layout.extras(rank)):
            (save_dir / name / relative).write_bytes(bytes(2000))
    return name


class CountingDisk(seam.Disk):
    """How often the disk is asked for something."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name[0] != "_" and name != "calls":
            self.calls.append(name)
        return super().__getattribute__(name)
