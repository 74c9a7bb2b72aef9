"""DeepSpeed's compiled ops: build them once where it can be seen, and find locks that dead builds left behind.

torch compiles extensions at first use under a file ``lock`` (``torch/utils/file_baton.py``).  A process killed
meanwhile leaves the file, and every later run waits for it for ever without a word.

Run as ``python -m nvme_resume.ops build | status | unlock``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nvme_resume import logs

log = logs.logger

BUILDERS = ("AsyncIOBuilder", "CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder")
CPU_ONLY_BUILDERS = ("ShareMemCommBuilder",)  # several ranks on one CPU-only machine
_SETTLE_SECONDS = 60.0  # a lock younger than this may belong to a build that has no compiler running yet
_TICK_SECONDS = 15.0


@dataclass(frozen=True)
class StaleLock:
    """A lock file that no living process works under."""

    path: Path
    age_seconds: float


def extensions_root() -> Path:
    """Where torch keeps compiled extensions (``torch/utils/cpp_extension.py::get_default_build_root``)."""
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "torch_extensions"


def find_stale_locks(root: Path | None = None) -> list[StaleLock]:
    """Locks older than a minute in whose folder no process runs or is named on a command line."""
    root = extensions_root() if root is None else root
    if not root.is_dir():
        return []
    found = []
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue
        if age > _SETTLE_SECONDS and not _in_use(lock.parent):
            found.append(StaleLock(lock, age))
    return found


def _in_use(folder: Path) -> bool:
    """Is any other process working in ``folder``, or called with it?"""
    wanted = os.fsencode(folder.resolve())
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if (
                os.fsencode((process / "cwd").readlink()) == wanted
                or wanted in (process / "cmdline").read_bytes()
            ):
                return True
        except OSError:
            continue  # it ended, or it is not ours to look at
    return False


def warn_stale_locks() -> None:
    """One warning for each stale lock, with the command that removes it."""
    for lock in find_stale_locks():
        log.warning(
            "%s was left by a build that died %.0f minutes ago: DeepSpeed would wait for it for ever. "
            "Remove it: python -m nvme_resume.ops unlock",
            lock.path,
            lock.age_seconds / 60,
        )


def unlock() -> None:
    """Remove stale locks, saying so."""
    for lock in find_stale_locks():
        print(f"removing {lock.path}, left by a build that died", flush=True)
        lock.path.unlink(missing_ok=True)


def build() -> int:
    """Build what is not built yet, one line for each op; the exit code."""
    unlock()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    names = BUILDERS + (CPU_ONLY_BUILDERS if accelerator.device_name() == "cpu" else ())
    failed = 0
    for number, name in enumerate(names, start=1):
        label = f"DeepSpeed op {number}/{len(names)} {name}"
        start = time.monotonic()
        built = threading.Event()
        ticker = threading.Thread(target=_tick, args=(label, built, start), daemon=True)
        ticker.start()
        try:
            accelerator.create_op_builder(name).load(verbose=False)
            outcome = "ready"
        except Exception as error:
            outcome = f"FAILED: {str(error).strip().splitlines()[-1]}"
            failed += 1
        built.set()
        ticker.join()
        print(f"{label}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


def _tick(label: str, built: threading.Event, start: float) -> None:
    while not built.wait(_TICK_SECONDS):
        print(f"{label}: compiling, {time.monotonic() - start:.0f} s so far", flush=True)


def status() -> int:
    """Print stale locks; exit code 1 when there are any."""
    stale = find_stale_locks()
    for lock in stale:
        print(f"stale: {lock.path} ({lock.age_seconds:.0f} s old)")
    return 1 if stale else 0


def main(arguments: list[str]) -> int:
    """``build``, ``status`` or ``unlock``."""
    if arguments == ["build"]:
        return build()
    if arguments == ["status"]:
        return status()
    if arguments == ["unlock"]:
        unlock()
        return 0
    print("usage: python -m nvme_resume.ops build | status | unlock", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
