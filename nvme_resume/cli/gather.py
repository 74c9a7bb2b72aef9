"""``nvme-resume gather``: one checkpoint out of the parts that nodes hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nvme_resume.cli.output import AsJson, show, with_exit_codes
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, NoCheckpointError, from_os_error
from nvme_resume.storage import gather, gather_stock, locks
from nvme_resume.storage.remote import Remote, is_url


@with_exit_codes
def command(
    folders: Annotated[
        list[str],
        typer.Argument(help="save folders of the nodes as they were copied here, or URLs (s3://...)"),
    ],
    to: Annotated[Path, typer.Option(help="the save folder that is to hold all; may be one of them")],
    tag: Annotated[str | None, typer.Option(help="which checkpoint; default: the newest step")] = None,
    as_json: AsJson = False,
) -> int:
    """Bring the parts of a checkpoint together that nodes with disks of their own saved.

    Every byte with a known hash is compared on the way.  Repeated runs move only what is missing.  Folders of a
    Trainer (checkpoint-N) keep its files; those of plain DeepSpeed are renamed from local to global ranks.

    Exit codes: 0 good, 2 different checkpoints, 10 parts are missing, 11 a job saves in --to, 12 corrupt, 14 no space.
    """
    into = to.resolve()
    if into.exists() and not into.is_dir():
        raise ConfigError("--to is no folder", path=str(to), hint="name a folder, or one that is to be made")
    sources = [Remote(f) if is_url(f) else _folder(f, into) for f in folders]
    try:
        into.mkdir(parents=True, exist_ok=True)
        lock = locks.take_save_folder(into, hint="wait for its end, or gather into another folder")
        try:
            found = _gather(sources, into, tag)
        finally:
            lock.close()
    except OSError as error:
        raise from_os_error(error, "gather") from error
    remark = f"{found.moved / (1 << 20):.1f} MiB copied" if found.moved else "nothing to copy"
    step = "written by plain DeepSpeed" if found.step is None else f"step {found.step}"
    show(
        {"path": str(found.path), "step": found.step, "ranks": found.ranks, "bytes": found.moved},
        f"{found.path}: complete, {step}, {found.ranks} ranks, {remark}",
        as_json=as_json,
    )
    return 0


def _folder(given: str, into: Path) -> Path:
    source = Path(given).resolve()
    if not source.is_dir():
        raise NoCheckpointError("there is no such folder to gather from", path=given)
    if source in into.parents:
        raise ConfigError(
            "--to lies inside a folder that is gathered from",
            path=str(into),
            hint=f"name a folder beside {given}, or {given} itself",
        )
    return source


def _gather(sources: Sequence[Path | Remote], into: Path, tag: str | None) -> gather.Gathered:
    visible = sys.stderr.isatty()
    try:
        return gather.gather(sources, into, tag, Options(), show=visible)
    except NoCheckpointError:
        local = [source for source in sources if isinstance(source, Path)]
        if not local or any(gather.look(source, tag, []) is not None for source in sources):
            raise
        name, folders = gather_stock.find(local, tag)
    from nvme_resume.zero3 import stock  # slow to import, and rarely needed

    world_size = stock.world_size_of(folders)
    return gather_stock.gather(name, folders, world_size, into, Options(), show=visible)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gather")(command)
