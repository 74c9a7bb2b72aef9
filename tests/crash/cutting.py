"""Saves of a small engine that are cut short by the shutdown of their file system, and loads of what it left.

Run as ``python -m tests.crash.cutting save|load CASE.json OUT.json`` (``harness.launch``).  The case is one of
``tests.training``'s with a list of ``cuts``: mounted folders and moments.  Each gets an engine of its own, which
swaps and saves there.  A moment is a count of changes to the save folder from the end of a save, or None: when the save
has returned (the first, whose changes are counted).
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

from nvme_resume.errors import NvmeResumeError
from nvme_resume.storage import disk as seam

_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2  # as a power cut: not even the journal is written
_CHANGES = (
    "write",
    "link",
    "cut",
    "make_folder",
    "remove_tree",
    "rename",
    "exchange",
    "sync_file",
    "sync_folder",
)


def shut_down(mounted: Path) -> None:
    descriptor = os.open(mounted, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


class Cutting(seam.Disk):
    """The file system is shut down before the n-th change of a save folder (0: never)."""

    def __init__(self, save_dir: Path, at: int) -> None:
        self.save_dir = save_dir
        self.at = at
        self.calls = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _CHANGES:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, Path) and a.is_relative_to(self.save_dir) for a in args):
                self.calls += 1
                if self.calls == self.at:
                    shut_down(self.save_dir.parent)
            return found(*args, **kwargs)

        return call


def engine_on(case: dict[str, Any], place: Path) -> Any:
    from tests import training

    return training.make_engine({**case, "nvme_path": str(place / "nvme")})


def save(case: dict[str, Any]) -> list[dict[str, Any]]:
    """For each cut: the state at save ``a`` and at ``b``, and whether ``b`` had been committed."""
    from tests import training

    reports = []
    changes = 0
    for cut in case["cuts"]:
        place, moment = Path(cut["place"]), cut["moment"]
        save_dir = place / "ck"
        engine = engine_on(case, place)
        training.train(case, engine, 0, 0, 1)
        engine.save_checkpoint(str(save_dir), tag="a")
        engine.wait_for_checkpoint()
        report: dict[str, Any] = {"a": training.digests(engine)}
        training.train(case, engine, 0, 1, 2)
        report["b"] = training.digests(engine)
        disk = Cutting(save_dir, 0 if moment is None else max(1, changes + 1 + moment))
        with seam.replaced(disk):
            try:
                engine.save_checkpoint(str(save_dir), tag=case["second_tag"])
                if case["nvme_checkpoint"].get("async"):
                    engine.wait_for_checkpoint()
                report["committed"] = True
            except NvmeResumeError as error:
                report |= {"committed": False, "error": str(error)}
            if moment is None:
                changes = disk.calls  # one that fails makes more, taking back what it did
                shut_down(place)
        reports.append(report)
    return reports


def load(case: dict[str, Any]) -> list[dict[str, Any]]:
    """For each: the state that a load brings back."""
    from tests import training

    reports = []
    for cut in case["cuts"]:
        place = Path(cut["place"])
        engine = engine_on({**case, "seed": 77}, place)
        path, _ = engine.load_checkpoint(str(place / "ck"))
        loaded = training.digests(engine)
        # And on it goes: one step, one save.
        training.train(case, engine, 0, 5, 6)
        engine.save_checkpoint(str(place / "ck"), tag="c")
        engine.wait_for_checkpoint()
        reports.append(
            {"path": path, "loaded": loaded, "there": sorted(p.name for p in (place / "ck").iterdir())}
        )
    return reports


if __name__ == "__main__":
    try:
        import torch

        torch.set_num_threads(1)
        act = {"save": save, "load": load}[sys.argv[1]]
        Path(sys.argv[3]).write_text(json.dumps(act(json.loads(Path(sys.argv[2]).read_text()))))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)
