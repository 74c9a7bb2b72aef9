"""What the kernel says about this process and its disk."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path


def written_by_process() -> int:
    """Bytes this process has caused to be written to storage, page cache included (/proc/self/io)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def written_to_device(path: Path) -> int | None:
    """Bytes written to the block device below ``path`` by anybody; None where there is none to ask."""
    device = path.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return int(stat.read_text().split()[6]) * 512 if stat.is_file() else None


def page_cache() -> int:
    """Bytes of file pages in memory."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Cached"].split()[0]) * 1024


def drop_caches() -> bool:
    """Empty the page cache (root only)."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def cpu_seconds(*, children: bool) -> float:
    """User and system time used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def reset_peak() -> int:
    """Start a new measurement of peak memory; the present resident set in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5\n")
    return memory("VmRSS")


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def fsync_tree(folder: Path) -> None:
    """What plain DeepSpeed leaves out: make a folder durable."""
    for root, _, names in os.walk(folder, topdown=False):
        for entry in [*(Path(root) / name for name in names), Path(root)]:
            descriptor = os.open(entry, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
