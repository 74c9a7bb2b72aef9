"""``nvme-resume verify``: is a checkpoint what was saved?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvme_resume.cli.output import AsJson, show, with_exit_codes
from nvme_resume.storage import audit


@with_exit_codes
def command(
    checkpoint: Annotated[Path, typer.Argument(help="the folder of one tag")],
    level: Annotated[
        audit.Level,
        typer.Option(help="records and sizes; some chunks of every file as well; or every byte"),
    ] = "structure",
    as_json: AsJson = False,
) -> int:
    """Check all files of CHECKPOINT on this disk against its records, and with a higher --level its hashes.

    Files of ranks whose hashes were not written yet are checked by size and time, and counted.

    Exit codes: 0 good, 10 no checkpoint, 12 corrupt.
    """
    folder = checkpoint.resolve()
    head, count, total, unsealed = audit.check(folder, level)
    remark = f", {unsealed} ranks without hashes" if unsealed else ""
    remark += " (--level full reads every byte)" if level != "full" else ""
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
