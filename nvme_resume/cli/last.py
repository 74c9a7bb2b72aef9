"""``nvme-resume last``: the checkpoint that a load without a tag would take."""

from __future__ import annotations

from pathlib import Path

import typer

from nvme_resume.cli.output import AsJson, show, with_exit_codes
from nvme_resume.errors import NoCheckpointError
from nvme_resume.storage import catalog


@with_exit_codes
def last(folder: Path, as_json: AsJson = False) -> int:
    """Print the newest complete checkpoint of FOLDER (records and sizes are checked, hashes are not).

    Exit codes: 0 good, 3 good but partial or damaged ones are there too, 10 none.
    """
    found = catalog.last_resumable(folder)
    bad = [e for e in catalog.entries(folder) if e.problem is not None]
    if found is None:
        raise NoCheckpointError(
            "no complete checkpoint here",
            path=str(folder),
            expected="a folder of checkpoints",
            found="; ".join(f"{e.tag}: {e.problem}" for e in bad) or "nothing",
        )
    problems = {e.tag: e.problem for e in bad}
    show({"path": str(found), "tag": found.name, "incomplete": problems}, str(found), as_json=as_json)
    if not as_json:
        for tag, problem in problems.items():
            typer.echo(f"{tag}: {problem}", err=True)
    return 3 if bad else 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("last")(last)
