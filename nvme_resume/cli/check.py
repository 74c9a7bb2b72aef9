"""``nvme-resume check``: does a resumed run continue the run that was stopped?

The command itself is ``consistency.command``; exit codes: 0 equal, 1 different or failed, 2 usage,
130 interrupted.
"""

from __future__ import annotations

import typer

from nvme_resume.consistency.command import check


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)
