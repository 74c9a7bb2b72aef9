"""``nvme-resume verify``: is a checkpoint what was saved?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from nvme_resume.cli.output import AsJson, show, with_exit_codes
from nvme_resume.config import Options
from nvme_resume.errors import NoCheckpointError
from nvme_resume.storage import records, verify


@with_exit_codes
def command(
    checkpoint: Annotated[Path, typer.Argument(help="the folder of one tag")],
    level: Annotated[
        Literal["structure", "full"], typer.Option(help="records and sizes, or every byte")
    ] = "full",
    as_json: AsJson = False,
) -> int:
    """Check all files of CHECKPOINT on this disk against its records and hashes.

    Files of ranks whose hashes were not written yet are checked by size and time, and counted.

    Exit codes: 0 good, 10 no checkpoint of nvme_resume, 12 corrupt.
    """
    folder = checkpoint.resolve()
    if not folder.is_dir() or not records.has_manifest(folder):
        raise NoCheckpointError(
            "not a checkpoint of nvme_resume",
            path=str(folder),
            hint="name the folder of a tag; those of plain DeepSpeed have no hashes to check",
        )
    head = records.read_manifest(folder)
    count = total = unsealed = 0
    for rank in range(head.world_size):
        record, seal, _ = records.read_rank(folder, head, rank)
        verify.structure(folder, record.files, rank=rank, tag=head.tag)
        if seal is None:
            unsealed += 1
            for name, listed in record.files.items():
                path = verify.path_of(folder, name, rank=rank, tag=head.tag)
                verify.check_untouched(path, listed, rank=rank, tag=head.tag)
        elif level == "full":
            verify.full(folder, seal.files, Options(), rank=rank, tag=head.tag)
        count += len(record.files)
        total += sum(f.size for f in record.files.values())
    remark = f", {unsealed} ranks without hashes" if unsealed else ""
    show(
        {
            "tag": head.tag,
            "step": head.global_steps,
            "level": level,
            "ranks": head.world_size,
            "files": count,
            "bytes": total,
            "unsealed_ranks": unsealed,
        },
        f"{folder}: good ({level}), step {head.global_steps}, {head.world_size} ranks, {count} files, "
        f"{total / (1 << 20):.1f} MiB{remark}",
        as_json=as_json,
    )
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(command)
