"""``nvme-resume prune``: remove old checkpoints of a save folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvme_resume.cli.output import AsJson, show, with_exit_codes
from nvme_resume.errors import NoCheckpointError, from_os_error
from nvme_resume.storage import catalog, commit, locks, prune


@with_exit_codes
def command(
    folder: Path,
    keep_last: Annotated[
        int, typer.Option(min=1, help="how many complete checkpoints stay, newest steps first")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    as_json: AsJson = False,
) -> int:
    """Remove complete checkpoints of FOLDER beyond the newest, and what interrupted saves left.

    Stays: what ``latest`` names, damaged checkpoints, those of plain DeepSpeed.

    Exit codes: 0 good, 10 no checkpoint, 11 a job is saving there.
    """
    folder = folder.resolve()
    if not catalog.tags(folder):
        raise NoCheckpointError("no checkpoint here", path=str(folder))
    if dry_run:
        tags = [entry.tag for entry in prune.outdated(folder, keep_last)]
        left = [path.name for path in catalog.leftovers(folder)]
    else:
        tags, left = _prune(folder, keep_last)
    words = "would remove" if dry_run else "removed"
    show(
        {"removed": tags, "leftovers": left, "dry_run": dry_run},
        "\n".join(f"{words} {name}" for name in [*tags, *left]) or "nothing to remove",
        as_json=as_json,
    )
    return 0


def _prune(folder: Path, keep_last: int) -> tuple[list[str], list[str]]:
    try:
        lock = locks.take_save_folder(
            folder, hint='set "keep_last" in the configuration of that job, or wait for its end'
        )
        try:
            left = catalog.leftovers(folder)
            for path in left:
                commit.recover(path)
            return prune.prune(folder, keep_last), [path.name for path in left]
        finally:
            lock.close()
    except OSError as error:
        raise from_os_error(error, "prune") from error


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prune")(command)
