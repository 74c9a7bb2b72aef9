"""The folders of a job: file system, space, O_DIRECT, links between them, owners, what dead jobs left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nvme_resume import layout, ops
from nvme_resume.doctor.finding import Finding
from nvme_resume.storage import catalog, ladder, locks
from nvme_resume.storage import disk as seam

_DIRECT_BYTES = 4096


def folder(what: str, path: Path) -> Iterator[Finding]:
    """One folder that is written to."""
    there = next(p for p in (path, *path.parents) if p.is_dir())
    mount, kind = ops.mount_of(there)
    info = os.statvfs(there)
    free, files = info.f_bavail * info.f_frsize, info.f_favail if info.f_files else None
    remark = "" if there == path else f"; does not exist yet, {there} does"
    yield Finding(what, f"{path}: {kind} at {mount}, {free / (1 << 30):.1f} GiB free{remark}")
    if kind == "tmpfs":
        yield Finding(what, "tmpfs: memory, gone at the next boot", "note")
    if files is not None and files < 10_000:
        yield Finding(what, f"{files} inodes free", "bad", "remove files there (df -i)")
    if not os.access(there, os.W_OK | os.X_OK):
        yield Finding(what, f"{there} may not be written to", "bad", "look at its owner, mode and mount")
        return
    yield _direct(what, there)
    yield _reflink(what, there)


def _direct(what: str, there: Path) -> Finding:
    """Does O_DIRECT work?  DeepSpeed's aio op opens every swap file with it."""
    import mmap

    with tempfile.TemporaryDirectory(prefix=layout.STAGING_PREFIX, dir=there) as scratch:
        path = Path(scratch, "direct")
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            state = f"no O_DIRECT here: {error.strerror}"
            return Finding(what, state, "bad" if what == "nvme_path" else "note", "use another file system")
        try:
            with mmap.mmap(-1, _DIRECT_BYTES) as page:
                os.write(descriptor, page)
        except OSError as error:
            return Finding(what, f"O_DIRECT writes fail: {error.strerror}", "note")
        finally:
            os.close(descriptor)
    return Finding(what, "O_DIRECT works")


def _reflink(what: str, there: Path) -> Finding:
    """Can files share blocks?  It lets a checkpoint be taken without links; nothing needs it."""
    with tempfile.TemporaryDirectory(prefix=layout.STAGING_PREFIX, dir=there) as scratch:
        one = Path(scratch, "one")
        one.write_bytes(bytes(_DIRECT_BYTES))
        try:
            seam.current().clone(one, Path(scratch, "other"))
        except OSError:
            return Finding(what, "no reflinks (not needed where links work)")
    return Finding(what, "reflinks work")


def between(nvme_path: Path, save_dir: Path) -> Iterator[Finding]:
    """How swap files get from one folder to the other."""
    if not (nvme_path.is_dir() and save_dir.is_dir()):
        return
    words = {
        "link": "links: a save copies nothing",
        "reflink": "reflinks: a save shares blocks",
        "server": 'copy_file_range: a save copies all bytes; with "async": true training does not wait',
        "direct": 'the O_DIRECT copier: a save copies all bytes; with "async": true training does not wait',
    }
    scratch = [Path(tempfile.mkdtemp(prefix=layout.STAGING_PREFIX, dir=d)) for d in (nvme_path, save_dir)]
    try:
        rung = ladder.probe(*scratch)
    except OSError as error:
        yield Finding("swap files get into checkpoints by", str(error), "bad", "look at both folders")
        return
    finally:
        for path in scratch:
            shutil.rmtree(path, ignore_errors=True)
    state = "good" if rung in ("link", "reflink") else "note"
    hint = None if state == "good" else "put both folders on one file system"
    yield Finding("swap files get into checkpoints by", words[rung], state, hint)  # type: ignore[arg-type]


def owners(nvme_path: Path | None, save_dir: Path | None) -> Iterator[Finding]:
    """Jobs that use the folders now, and what dead ones left."""
    if nvme_path is not None:
        root = layout.private_root(layout.swap_folder(nvme_path, 0))
        for lock in sorted(root.glob(f"rank*{layout.OWNER_LOCK}")):
            if locks.is_held(lock):
                yield Finding("nvme_path", f"{lock.stem} belongs to {locks.owner(lock)}", "note")
        dead = 0
        with suppress(OSError):
            dead = sum(
                p.is_dir() and not locks.is_held(Path(f"{p}{layout.OWNER_LOCK}")) for p in root.iterdir()
            )
        if dead:
            yield Finding("nvme_path", f"{dead} folders of dead jobs; the next start removes them", "note")
    if save_dir is not None and save_dir.is_dir():
        lock = save_dir / layout.WRITER_LOCK
        held = locks.is_held(lock)
        if held:
            yield Finding("save folder", f"belongs to {locks.owner(lock)}", "note")
        left = catalog.leftovers(save_dir)
        if left and not held:
            yield Finding(
                "save folder",
                f"{len(left)} leftovers of interrupted saves; the next save removes them",
                "note",
            )
        found = catalog.entries(save_dir)
        bad = [e for e in found if e.problem is not None]
        last = catalog.last_resumable(save_dir)
        yield Finding(
            "save folder",
            f"{len(found)} checkpoints, a load takes {last.name if last else 'none'}",
            "good" if last or not found else "bad",
        )
        for entry in bad:
            yield Finding("save folder", f"{entry.tag}: {entry.problem}", "note")
