"""Hostile checkpoints are refused by whatever reads them: quickly, in little memory, opening nothing outside."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nvme_resume import NvmeResumeError, last_resumable
from nvme_resume.cli import app
from nvme_resume.storage import audit, catalog, records, transfer
from tests.attacks.forge import Forge
from tests.attacks.hostile import ALL, build

SECONDS = 1.0
BYTES = 64 << 20

opened: list[tuple[str, int]] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opened is not None and isinstance(arguments[0], str):
        opened.append((arguments[0], arguments[2] or 0))


sys.addaudithook(_watch)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """What is opened, by Python or by the native copier: path, flags."""
    global opened
    opened = []
    real = transfer.run

    def run(copies: Any, *args: Any, **kwargs: Any) -> Any:
        assert opened is not None
        for copy in copies:
            assert copy.dst is None
            opened.append((str(copy.src), os.O_RDONLY))
        return real(copies, *args, **kwargs)

    monkeypatch.setattr(transfer, "run", run)
    try:
        yield opened
    finally:
        opened = None


def test_what_is_forged_is_sound_as_long_as_it_does_not_lie(tmp_path: Path) -> None:
    """Else every attack would be refused for the wrong reason."""
    folder = Forge().write(tmp_path)
    assert audit.check(folder, "full").unsealed == 0
    assert last_resumable(tmp_path) == folder
    Forge.of(folder).write(tmp_path)
    assert audit.check(folder, "full").files == 12


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(NvmeResumeError) as caught:
        work()
    assert caught.value.exit_code in (12, 13)
    assert len(str(caught.value)) < 20_000  # what is refused is not repeated at length


@pytest.mark.parametrize("name", ALL)
def test_every_reader_refuses_it(tmp_path: Path, name: str, watched: list[tuple[str, int]]) -> None:
    save_dir = tmp_path / "save"
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "outside").unlink()
    folder = build(name, Forge(), save_dir)

    def read_all() -> None:
        head = records.read_manifest(folder)
        for rank in range(head.world_size):
            record, _, _ = records.read_rank(folder, head, rank)
            for relative, listed in record.files.items():
                audit.verify.check_size(
                    audit.verify.path_of(folder, relative, rank=rank, tag="t"),
                    listed.size,
                    rank=rank,
                    tag="t",
                )
        if head.tag != folder.name:
            raise NvmeResumeErrorOfTag

    cli = CliRunner()
    watched.clear()
    tracemalloc.start()
    start = time.monotonic()
    try:
        entry = catalog.look(save_dir, "t")
        assert entry.problem is not None
        assert last_resumable(save_dir) is None
        refused(lambda: audit.check(folder, "structure"))
        refused(lambda: audit.check(folder, "full"))
        if not name.startswith("tag "):
            refused(read_all)
        answers = [
            cli.invoke(app, ["verify", str(folder)]),
            cli.invoke(app, ["verify", str(folder), "--json"]),
        ]
        for answer in answers:
            assert answer.exit_code in (12, 13), (answer.output, answer.exception)
        assert cli.invoke(app, ["inspect", str(save_dir)]).exit_code == 3
        assert cli.invoke(app, ["last", str(save_dir)]).exit_code == 10
        seconds, peak = time.monotonic() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 8 * SECONDS  # eight questions
    assert peak < BYTES
    inside = f"{save_dir}/"
    for path, flags in watched:
        if Path(path).suffix in (".py", ".pyc") or path.startswith(
            (sys.prefix, sys.base_prefix, "/proc/self")
        ):
            continue
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), path
        if path.startswith(str(tmp_path)):
            assert path.startswith(inside) and ".." not in Path(path).parts, path
        else:
            assert not path.startswith(("/etc", "/dev")), path


class _OfTag(NvmeResumeError):
    exit_code = 12


NvmeResumeErrorOfTag = _OfTag("t")
