"""Versions, DeepSpeed's ops, libaio, what dead runs left behind."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from nvme_resume import ops
from nvme_resume.doctor.finding import Finding
from nvme_resume.version import __version__

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
_SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = "deepspeed_allreduce_buffer*"  # DeepSpeed 0.19.8, csrc/cpu/comm/shm.cpp


def findings() -> Iterator[Finding]:
    """Everything that does not depend on folders or a configuration."""
    yield Finding("nvme_resume", f"{__version__} with Python {platform.python_version()}")
    for name in _PACKAGES:
        yield _version(name)
    yield _copier()
    yield _libaio()
    yield from _ops()
    yield from _segments()


def _version(name: str) -> Finding:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        needed = name in ("torch", "deepspeed")
        return Finding(
            name, "not installed", "bad" if needed else "note", f"pip install {name}" if needed else None
        )
    if name == "deepspeed":
        from nvme_resume.zero3.supported import TESTED_DEEPSPEED

        if found not in TESTED_DEEPSPEED:
            return Finding(name, f"{found}, tested are {', '.join(TESTED_DEEPSPEED)}", "note")
    return Finding(name, found)


def _copier() -> Finding:
    try:
        from nvme_resume import _native
    except ImportError as error:
        return Finding("copier", str(error), "bad", "install nvme_resume again; it needs a C++17 compiler")
    return Finding("copier", f"built, {_native.CHUNK_BYTES >> 20} MiB hash chunks")


def _libaio() -> Finding:
    try:
        ctypes.CDLL("libaio.so.1")
    except OSError:
        try:
            ctypes.CDLL("libaio.so.1t64")  # Debian 13 and Ubuntu 24.04
        except OSError:
            return Finding("libaio", "missing", "bad", "apt-get install libaio-dev (DeepSpeed needs it too)")
    try:
        used, most = (int(Path(f"/proc/sys/fs/aio-{n}").read_text()) for n in ("nr", "max-nr"))
    except (OSError, ValueError):
        return Finding("libaio", "there")
    if most - used < 4096:
        return Finding("libaio", f"{used} of {most} requests in use", "bad", "sysctl fs.aio-max-nr=1048576")
    return Finding("libaio", f"there, {used} of {most} requests in use")


def _ops() -> Iterator[Finding]:
    root = ops.extensions_root()
    built = sorted({path.stem for path in ops.built_ops()})
    if "async_io" in built:
        yield Finding("DeepSpeed ops", f"{', '.join(built)} in {root}")
    else:
        yield Finding(
            "DeepSpeed ops",
            f"async_io is not built in {root}" + (f" ({', '.join(built)} are)" if built else ""),
            "note",
            "nvme-resume build-ops (else the first training step compiles for minutes)",
        )
    for lock in ops.find_stale_locks(root):
        yield Finding(
            "stale build lock",
            f"{lock.path}, left {lock.age_seconds / 60:.0f} minutes ago: DeepSpeed would wait for ever",
            "bad",
            "python -m nvme_resume.ops unlock",
        )


def _segments() -> Iterator[Finding]:
    """Shared memory of DeepSpeed's CPU collectives that no living process maps."""
    if not _SHARED_MEMORY.is_dir():
        return
    segments = sorted(_SHARED_MEMORY.glob(_SEGMENTS))
    if not segments:
        return
    used = _mapped()
    dead = [path for path in segments if str(path) not in used]
    if dead:
        total = sum(path.stat().st_blocks * 512 for path in dead) >> 20
        yield Finding(
            "shared memory of dead runs",
            f"{len(dead)} segments, {total} MiB",
            "note",
            f"rm {' '.join(map(str, dead[:4]))}{' ...' if len(dead) > 4 else ''}",
        )


def _mapped() -> set[str]:
    """Files in shared memory that some process maps, as far as we may look."""
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        found |= {line[line.index("/dev/shm") :] for line in lines if f" {os.sep}dev/shm" in line}
    return found
