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
_CONFIRM_SECONDS = 0.2  # between two looks at a lock: a builder that ends closes its lock, then removes it

# Where a builder may run on another machine, out of sight: there only silence of an hour tells.
_NETWORK_FILESYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.glusterfs",
    "fuse.sshfs",
)
_NETWORK_SETTLE_SECONDS = 3600.0


@dataclass(frozen=True)
class StaleLock:
    """A lock file that no living process works under."""

    path: Path
    age_seconds: float


def extensions_root() -> Path:
    """Where torch keeps compiled extensions (``torch/utils/cpp_extension.py::get_default_build_root``)."""
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def find_stale_locks(root: Path | None = None) -> list[StaleLock]:
    """Locks older than a minute that no process holds, and in whose folder none runs or is named."""
    root = extensions_root() if root is None else root
    if not root.is_dir():
        return []
    found = [
        stale for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]) if (stale := _stale(lock))
    ]
    if found:
        time.sleep(_CONFIRM_SECONDS)
    return [stale for lock in found if (stale := _stale(lock.path))]


def _stale(lock: Path) -> StaleLock | None:
    try:
        facts = lock.stat()
        age = time.time() - facts.st_mtime
        settle = _SETTLE_SECONDS
        if _on_network(lock.parent):
            settle = _NETWORK_SETTLE_SECONDS
            age = min(age, *(time.time() - path.stat().st_mtime for path in lock.parent.iterdir()))
    except FileNotFoundError:
        return None
    return StaleLock(lock, age) if age > settle and not _in_use(lock, facts.st_uid) else None


def _on_network(folder: Path) -> bool:
    """Is ``folder`` on a filesystem that other machines may write to?"""
    return mount_of(folder)[1].startswith(_NETWORK_FILESYSTEMS)


def mount_of(folder: Path) -> tuple[Path, str]:
    """Mount point and kind of the filesystem that holds ``folder`` (kind "" where nobody knows)."""
    folder, kinds = folder.resolve(), {}
    for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
        _, mount, kind, *_ = line.split(" ")
        kinds[Path(mount.replace("\\040", " "))] = kind
    return next(((path, kinds[path]) for path in (folder, *folder.parents) if path in kinds), (folder, ""))


def _in_use(lock: Path, owner: int) -> bool:
    """Does a process hold ``lock`` open (torch's does while it builds), or work in its folder, or name it?

    Where the lock is another user's, a process of theirs that we may not look at counts: it may be the builder.
    """
    lock = lock.resolve()
    folder, name = os.fsencode(lock.parent), os.fsencode(lock)
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if int(process.name) != os.getpid() and (
                folder in (process / "cmdline").read_bytes()
                or os.fsencode((process / "cwd").readlink()) == folder
            ):
                return True
            if any(_target(entry) == name for entry in (process / "fd").iterdir()):
                return True
        except PermissionError:
            if owner != os.geteuid() and _owner(process) == owner:
                return True
        except OSError:
            continue  # it ended
    return False


def _owner(process: Path) -> int | None:
    try:
        return process.stat().st_uid
    except FileNotFoundError:
        return None


def _target(link: Path) -> bytes | None:
    try:
        return os.fsencode(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return None


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
            builder = accelerator.create_op_builder(name)
            if not any(op.stem == builder.name for op in built_ops()):
                print(f"{label}: compiling, may take minutes", flush=True)
            _wait_for_lock(label, builder.name, "pin_memory")  # async_io builds pin_memory on its way
            builder.load(verbose=False)
            outcome = "ready"
        except Exception as error:
            print(
                f"{error}", file=sys.stderr, flush=True
            )  # all of it: the compiler's words are in the middle
            outcome = f"FAILED: {(str(error).strip() or repr(error)).splitlines()[0]}"
            failed += 1
        finally:
            built.set()
            ticker.join()
        print(f"{label}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


def _wait_for_lock(label: str, *ops: str) -> None:
    """Until the builder is done or the ticker has found it dead.

    Left to wait by itself torch takes the op for built when the lock goes, and does not compile it.
    """
    root = extensions_root()
    for lock in [path for op in ops for path in [root / op / "lock", *root.glob(f"*/{op}/lock")]]:
        if lock.exists():
            print(f"{label}: waiting for {lock}, of another build or of a dead one", flush=True)
        while lock.exists():
            time.sleep(_CONFIRM_SECONDS)


def built_ops() -> list[Path]:
    """The libraries of compiled ops, each in a folder of its name."""
    root = extensions_root()
    return sorted(
        path for path in [*root.glob("*/*.so"), *root.glob("*/*/*.so")] if path.stem == path.parent.name
    )


def _tick(label: str, built: threading.Event, start: float) -> None:
    while not built.wait(_TICK_SECONDS):
        print(f"{label}: compiling, {time.monotonic() - start:.0f} s so far", flush=True)
        unlock()  # a lock that was too young to judge at the start


def status() -> int:
    """Print what is built and which locks are stale; exit code 1 when there are such locks."""
    for op in built_ops():
        print(f"built: {op}")
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
