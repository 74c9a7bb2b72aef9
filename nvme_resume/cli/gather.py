"""``nvme-resume gather``: one checkpoint out of the parts that nodes hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nvme_resume.cli.output import AsJson, show, with_exit_codes
from nvme_resume.config import Options
from nvme_resume.errors import from_os_error
from nvme_resume.storage import gather, locks


@with_exit_codes
def command(
    folders: Annotated[
        list[Path], typer.Argument(help="save folders of the nodes, as they were copied here")
    ],
    to: Annotated[Path, typer.Option(help="the save folder that is to hold all; may be one of them")],
    tag: Annotated[str | None, typer.Option(help="which checkpoint; default: the newest step")] = None,
    as_json: AsJson = False,
) -> int:
    """Bring the parts of a checkpoint together that nodes with disks of their own saved.

    Every byte with a known hash is compared on the way.  Repeated runs move only what is missing.

    Exit codes: 0 good, 2 different checkpoints, 10 parts are missing, 11 a job saves in --to, 12 corrupt, 14 no space.
    """
    into = to.resolve()
    try:
        into.mkdir(parents=True, exist_ok=True)
        lock = locks.take_save_folder(into, hint="wait for its end, or gather into another folder")
        try:
            sources = [folder.resolve() for folder in folders]
            found = gather.gather(sources, into, tag, Options(), show=sys.stderr.isatty())
        finally:
            lock.close()
    except OSError as error:
        raise from_os_error(error, "gather") from error
    remark = f"{found.moved / (1 << 20):.1f} MiB copied" if found.moved else "nothing to copy"
    show(
        {
            "path": str(found.path),
            "step": found.head.global_steps,
            "ranks": found.head.world_size,
            "bytes": found.moved,
        },
        f"{found.path}: complete, step {found.head.global_steps}, {found.head.world_size} ranks, {remark}",
        as_json=as_json,
    )
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gather")(command)
