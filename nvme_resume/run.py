"""Run a training script as it is, with exact checkpoints: ``python -m nvme_resume.run train.py --its --arguments``.

Behind any launcher that can start a module: ``torchrun -m nvme_resume.run train.py``, ``deepspeed --module
nvme_resume.run train.py``, ``accelerate launch -m nvme_resume.run train.py``.  With ``-m`` the training program is a
module itself.  The same as ``import nvme_resume; nvme_resume.install()`` in its first line.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from nvme_resume.installer import install

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # errors of other people's programs

_programs: list[tuple[str, bool]] = []  # what to run, and whether it is a module


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE", help="The training program.")],
    module: Annotated[bool, typer.Option("-m", help="It is a module, not a file.")] = False,
    save_on_sigterm: Annotated[
        bool, typer.Option("--save-on-sigterm", help="Trainers save and stop when a rank is told to end.")
    ] = False,
    local_rank: Annotated[
        str | None, typer.Option("--local_rank", "--local-rank", help="What some launchers add; passed on.")
    ] = None,
) -> None:
    """Run a training program with exact checkpoints; what follows its name is passed to it."""
    if not module and not Path(program).is_file():
        raise typer.BadParameter(f"there is no file {program}", param_hint="SCRIPT")
    install(save_on_sigterm=save_on_sigterm)
    # DeepSpeed's launcher puts it before all arguments, as it would for the program.
    sys.argv[1:] = [*([] if local_rank is None else [f"--local_rank={local_rank}"]), *context.args]
    sys.argv[0] = program
    sys.path[0] = str(Path.cwd() if module else Path(program).resolve().parent)  # as python has it
    _programs.append((program, module))


def main() -> None:
    """Read the arguments, then run the program: outside of typer, which has its own ideas of exceptions."""
    try:
        app()
    except SystemExit:
        if not _programs:  # wrong arguments, or --help
            raise
    program, module = _programs.pop()
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
