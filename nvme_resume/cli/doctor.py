"""``nvme-resume doctor``: will exact checkpoints work here?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from nvme_resume.cli.output import AsJson, console, show, with_exit_codes
from nvme_resume.config import nvme_paths
from nvme_resume.doctor import folders, machine, settings
from nvme_resume.doctor.finding import Finding

_MARKS = {"good": "ok", "note": "note", "bad": "BAD"}


@with_exit_codes
def doctor(
    config: Annotated[Path | None, typer.Option(help="a DeepSpeed configuration (JSON)")] = None,
    nvme_path: Annotated[
        Path | None, typer.Option(help="where optimizer state is swapped; default: what --config says")
    ] = None,
    save_dir: Annotated[Path | None, typer.Option(help="where checkpoints go")] = None,
    as_json: AsJson = False,
) -> int:
    """Report versions, DeepSpeed's ops, stale build locks, and the folders and configuration named.

    Exit codes: 0 nothing bad, 1 something will fail or hang, 2 no configuration in --config.
    """
    found = list(_findings(config, nvme_path, save_dir))
    if as_json:
        show({"findings": [f._asdict() for f in found]}, "", as_json=True)
    else:
        table = Table("", "what", "found", show_edge=False)
        for finding in found:
            hint = f"\nNext: {finding.hint}" if finding.hint and finding.state != "good" else ""
            table.add_row(_MARKS[finding.state], finding.what, finding.value + hint)
        console.print(table)
    return 1 if any(f.state == "bad" for f in found) else 0


def _findings(config: Path | None, nvme_path: Path | None, save_dir: Path | None) -> Iterator[Finding]:
    yield from machine.findings()
    swaps = [] if nvme_path is None else [nvme_path]
    if config is not None:
        value = settings.read(config)
        yield from settings.findings(value)
        swaps = swaps or nvme_paths(value)
    for path in swaps:
        yield from folders.folder("nvme_path", path.absolute())
        yield from folders.owners(path.absolute(), None)
    if save_dir is not None:
        yield from folders.folder("save folder", save_dir.absolute())
        yield from folders.owners(None, save_dir.absolute())
        for path in swaps:
            yield from folders.between(path.absolute(), save_dir.absolute())


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)
