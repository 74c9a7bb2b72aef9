"""A whole checkpoint, all ranks at once: is it what was saved?  Reads only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, NoCheckpointError
from nvme_resume.manifest import Manifest
from nvme_resume.storage import records, verify

Level = Literal["structure", "sampled", "full"]


class Found(NamedTuple):
    """A sound checkpoint and what of it was looked at."""

    head: Manifest
    files: int
    nbytes: int
    unsealed: int  # ranks without hashes: sizes and times are all there is to check


def check(folder: Path, level: Level) -> Found:
    """Check every file of every rank; raises the first CorruptError, which names the file."""
    if not folder.is_dir() or not records.has_manifest(folder):
        raise NoCheckpointError(
            "not a checkpoint of nvme_resume",
            path=str(folder),
            hint="name the folder of a tag; those of plain DeepSpeed have no hashes to check",
        )
    head = records.read_manifest(folder)
    if head.tag != folder.name:
        raise CorruptError(
            "this folder holds another tag",
            path=str(folder / layout.manifest()),
            expected=folder.name,
            found=head.tag,
            hint="give the folder its name back",
        )
    count = total = unsealed = 0
    for rank in range(head.world_size):
        record, seal, _ = records.read_rank(folder, head, rank)
        verify.structure(folder, record.files, rank=rank, tag=head.tag)
        if seal is None:
            unsealed += 1
            verify.untouched(folder, record.files, rank=rank, tag=head.tag)
        elif level != "structure":
            look = verify.full if level == "full" else verify.sampled
            look(folder, seal.files, Options(), rank=rank, tag=head.tag)
        count += len(record.files)
        total += sum(f.size for f in record.files.values())
    return Found(head, count, total, unsealed)
