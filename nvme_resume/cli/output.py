"""What the commands share: JSON or text, and errors as exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console

from nvme_resume.errors import NvmeResumeError

P = ParamSpec("P")

AsJson = Annotated[bool, typer.Option("--json", help="one JSON object instead of text")]
console = Console(soft_wrap=True, highlight=False, markup=False)  # paths and errors hold brackets


def show(value: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command."""
    if as_json:
        typer.echo(json.dumps(value))
    else:
        console.print(text)


def with_exit_codes(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a command's result, or one of our errors, into the exit code of the process."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except NvmeResumeError as error:
            if kwargs.get("as_json"):
                typer.echo(
                    json.dumps({"error": type(error).__name__, "message": error.message, **error.facts()})
                )
            else:
                typer.echo(f"{type(error).__name__}: {error}", err=True)
            code = error.exit_code
        raise typer.Exit(code)

    return run
