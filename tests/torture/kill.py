"""SIGKILL at a chosen call: of the disk seam, of the native copier, of DeepSpeed's own file writers.

Armed in the process that is to die.  Where it dies is written to a file just before: the kernel keeps that.
"""

from __future__ import annotations

import inspect
import io
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvme_resume.storage import disk as seam

OPERATIONS = tuple(name for name, _ in inspect.getmembers(seam.Disk, inspect.isfunction) if name[0] != "_")
READING = frozenset({"read", "size", "identity", "device", "free_bytes", "free_files", "names", "writable"})
HALVES = frozenset({"write", "remove_tree", "server_copy"})  # can be cut short in the middle


@dataclass(frozen=True)
class Trap:
    """Die at the ``n``-th call (from 1) of a kind.  ``n`` = 0: count only."""

    kind: str  # "disk", "native", "stock"
    n: int = 0
    when: str = "before"  # "before", "half", "after"


def die() -> None:
    """As if the machine's owner had typed kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # another thread than the main one: until the signal has arrived


class Tally:
    """Counts the calls of one kind and springs the trap."""

    def __init__(self, trap: Trap | None, note: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self._trap = trap
        self._note = note
        self._lock = threading.Lock()

    def pass_by(self, operation: str, path: Path, real: Callable[[], Any], half: Callable[[], Any]) -> Any:
        """Do one call, or die at it."""
        with self._lock:
            self.calls.append((operation, tail(path)))
            sprung = self._trap is not None and len(self.calls) == self._trap.n
        if not sprung or self._trap is None:
            return real()
        note = f"{operation} {tail(path)}"
        if self._trap.when == "before":
            self._end(note)
        if self._trap.when == "half":
            half()
            self._end(note)
        try:
            return real()
        finally:
            self._end(note)

    def _end(self, note: str) -> None:
        self._note.write_text(note)
        die()


def tail(path: Path) -> str:
    """The last names of a path: enough to recognise it."""
    return "/".join(Path(path).parts[-2:])


class KillDisk(seam.Disk):
    """The real disk, with a trap.  ``exchanges`` False: a file system that cannot swap two names."""

    def __init__(self, tally: Tally, *, exchanges: bool = True) -> None:
        self._tally = tally
        self._exchanges = exchanges

    def _pass(self, operation: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        real = getattr(super(), operation)
        if operation == "exchange" and not self._exchanges:
            real = _cannot_exchange
        return self._tally.pass_by(
            operation,
            arguments[0],
            lambda: real(*arguments, **options),
            lambda: _half(operation, *arguments),
        )


def _cannot_exchange(one: Path, other: Path) -> bool:
    return False


def _trapped(operation: str) -> Callable[..., Any]:
    def call(self: KillDisk, *arguments: Any, **options: Any) -> Any:
        return self._pass(operation, arguments, options)

    return call


for _operation in OPERATIONS:  # those that are added to the seam later, too
    setattr(KillDisk, _operation, _trapped(_operation))


def _half(operation: str, path: Path, *rest: Any) -> None:
    """Half of what the call would have done."""
    if operation == "write":
        with path.open("xb") as file:
            file.write(rest[0][: len(rest[0]) // 2])
    elif operation == "server_copy":
        with path.open("rb") as reader, rest[0].open("xb") as writer:
            writer.write(reader.read(rest[1] // 2))
    elif operation == "remove_tree" and path.is_dir():
        files = sorted(p for p in path.rglob("*") if not p.is_dir())
        for file in files[::2]:
            file.unlink()


def _half_of_torch_save(real: Callable[..., Any], content: Any, path: Any) -> None:
    whole = io.BytesIO()
    real(content, whole)
    Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])


def _half_of_save_file(real: Callable[..., Any], tensors: Any, path: Any) -> None:
    real(tensors, path)
    os.truncate(path, Path(path).stat().st_size // 2)


class Armed:
    """The traps of one process; all three kinds are counted, one springs."""

    def __init__(self, trap: Trap | None, note: Path, *, exchanges: bool) -> None:
        import torch

        from nvme_resume import _native
        from nvme_resume.zero3 import capture

        trap = None if trap is not None and trap.n == 0 else trap
        self.disk = Tally(trap if trap and trap.kind == "disk" else None, note)
        self.stock = Tally(trap if trap and trap.kind == "stock" else None, note)
        seam.disk = KillDisk(self.disk, exchanges=exchanges)
        for module, name, half in (
            (torch, "save", _half_of_torch_save),
            (capture, "save_file", _half_of_save_file),
        ):
            setattr(module, name, self._stock(name, getattr(module, name), half))
        if trap and trap.kind == "native":
            note.write_text("native copier")  # it dies in C++, which tells nobody where
            _native._testing_kill_at(trap.n)

    def _stock(self, name: str, real: Callable[..., Any], half: Callable[..., Any]) -> Callable[..., Any]:
        def call(content: Any, path: Any, *rest: Any, **options: Any) -> Any:
            if not isinstance(path, str | Path):
                return real(content, path, *rest, **options)
            return self.stock.pass_by(
                name,
                Path(path),
                lambda: real(content, path, *rest, **options),
                lambda: half(real, content, path),
            )

        return call

    def counted(self) -> dict[str, list[tuple[str, str]]]:
        """What was called."""
        return {"disk": list(self.disk.calls), "stock": list(self.stock.calls)}


def plain(trap: Trap) -> dict[str, Any]:
    """For reports."""
    return asdict(trap)
