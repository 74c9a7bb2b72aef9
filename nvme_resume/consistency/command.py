"""The command ``check``.

It stands here and not in ``cli`` because ``python -m nvme_resume.consistency`` is the same command, and
imports point downwards only.
"""

from __future__ import annotations

import json
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from nvme_resume import ops
from nvme_resume.consistency import factory, launch
from nvme_resume.consistency.run import Check
from nvme_resume.consistency.settings import Settings
from nvme_resume.errors import NvmeResumeError

INTERRUPTED = 130


class Dtype(str, Enum):
    """Values of --dtype."""

    bf16 = "bf16"
    fp32 = "fp32"


def check(
    steps: Annotated[int, typer.Option(help="Optimizer steps of the whole run.", min=2)] = 10,
    save_at: Annotated[
        int | None, typer.Option(help="Save and stop after this step.", show_default="half way")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes.", show_default="2 with two cores or accelerators, else 1", min=1),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed configuration (JSON) instead of the built-in one.", dir_okay=False),
    ] = None,
    factory_name: Annotated[
        str,
        typer.Option(
            "--factory",
            metavar="MODULE:FUNCTION",
            help="Your model and data; see nvme_resume.consistency.factory for what the function returns.",
            show_default="a random Llama of 2 million parameters",
        ),
    ] = factory.BUILT_IN,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Precision.", show_default="what the configuration says; built-in: bf16"),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the initial weights; the resumed run gets the next one.")
    ] = 1,
    compare_stock: Annotated[
        bool, typer.Option("--compare-stock", help="Run (c), plain DeepSpeed, as well.")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(help="Accept losses this far apart. NOT an exact check any more.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Work folder, new or empty.", show_default="./check-<time>", file_okay=False),
    ] = None,
    nvme_path: Annotated[
        Path | None,
        typer.Option(help="Folder for swap files.", show_default="in the work folder", file_okay=False),
    ] = None,
    keep_nvme_path: Annotated[
        bool, typer.Option("--keep-nvme-path", help="Swap where --config says; all runs share that folder.")
    ] = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep swap files and checkpoints (those of a failed check always stay)."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a rank counts as lost.")
    ] = 900.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON on stdout, all else on stderr.")
    ] = False,
) -> None:
    """Check that a resumed run continues the stopped one to the last bit.

    Trains (a) without a stop and (b) stopped, saved and resumed in fresh processes with another model seed,
    and compares every loss and digests of the whole state.  --compare-stock adds (c), the same by plain
    DeepSpeed.

    Exit codes: 0 equal to the last bit (or within --tolerance), 1 different or failed, 2 wrong usage,
    130 interrupted.  What (c) does never changes the exit code.
    """
    console = Console(stderr=as_json)
    try:
        wanted = Settings(
            out=out or Path(f"check-{time.strftime('%Y%m%d-%H%M%S')}"),
            steps=steps,
            save_at=save_at,
            ranks=ranks or launch.default_ranks(),
            config=config,
            nvme_path=nvme_path,
            keep_nvme_path=keep_nvme_path,
            factory=factory_name,
            dtype=None if dtype is None else dtype.value,
            seed=seed,
            compare_stock=compare_stock,
            tolerance=tolerance,
            timeout=timeout,
            keep=keep,
        )
        ops.warn_stale_locks()
        report = Check(wanted, console).run()
    except NvmeResumeError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        if as_json:
            typer.echo(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        console.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    report.show(console)
    if as_json:
        typer.echo(report.json())
    raise typer.Exit(report.exit_code)
