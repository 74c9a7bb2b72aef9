"""``nvme-resume build-ops``: compile DeepSpeed's ops now and in sight, not in the first training step.

Exit codes: 0 all ready, 1 one failed to build.
"""

from __future__ import annotations

import typer

from nvme_resume import ops


def build_ops() -> None:
    """Compile the DeepSpeed ops that NVMe offload needs; removes locks that dead builds left behind."""
    raise typer.Exit(ops.build())


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("build-ops")(build_ops)
