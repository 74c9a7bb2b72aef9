"""A disk that fails at a chosen call, and the program that saves and loads on it: one engine, many faults in turn.

Run as ``python -m tests.engine.faulty CASE.json`` (``test_failing_disk`` does).  What each fault led to is written to
``<out>.0.json``; losses go along, to be compared with those of a run that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from nvme_resume import NvmeResumeError, _native, layout
from nvme_resume.storage import disk as seam
from tests import training

READERS = ("read", "size", "identity", "device", "free_bytes")
WRITERS = (
    "write", "cut", "link", "clone", "server_copy", "allocate", "sync_file", "sync_folder", "make_folder", "rename",
    "exchange", "remove_tree",
)  # fmt: skip
SYNCS = ("sync_file", "sync_folder")


class FaultyDisk(seam.Disk):
    """The n-th call of all fails with ``code``; ``lasting``: so do all writing ones after it (a disk gone read-only).

    A write that fails leaves half of a file, an allocation that fails an empty one, as real disks do.
    """

    def __init__(self, fail_at: int, code: int, *, lasting: bool = False) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        self.fail_at = fail_at
        self.code = code
        self.lasting = lasting
        self.hit: list[str] | None = None  # method and path of the first call that failed
        self.failed_syncs: set[str] = set()
        self.synced_again: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found if name not in READERS + WRITERS else self._counted(name, found)

    def _counted(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = str(args[0])
            with self._lock:
                self.calls += 1
                first = self.calls == self.fail_at
                fails = first or (self.lasting and self.calls > self.fail_at > 0 and name in WRITERS)
                if first:
                    self.hit = [name, path]
                if name in SYNCS:
                    if path in self.failed_syncs:
                        self.synced_again.append(path)
                    if fails:
                        self.failed_syncs.add(path)
            if not fails:
                return real(*args, **kwargs)
            if first and name == "write" and self.code != errno.EROFS:
                args[0].write_bytes(args[1][: len(args[1]) // 2])
            if first and name == "allocate" and self.code != errno.EROFS:
                args[0].touch()
            raise OSError(self.code, os.strerror(self.code), path)

        return call


class FillingDisk(seam.Disk):
    """Before the first call of one method somebody else takes all the room that is left."""

    def __init__(self, point: str, filler: Path) -> None:
        self.point = point
        self.filler = filler

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "point" or name != self.point or self.filler.exists():
            return found
        real = found

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = real(*args, **kwargs) if name == "free_bytes" else None  # asked, and then taken away
            fill(self.filler)
            return answer if name == "free_bytes" else real(*args, **kwargs)

        return call


def fill(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * (1 << 20))


@contextlib.contextmanager
def filled(point: str, folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    if point == "preflight":
        fill(filler)
    try:
        with seam.replaced(FillingDisk(point, filler)):
            yield
        assert filler.exists(), f"no call of {point}"
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder: Path) -> dict[str, Any]:
    """Every path below a folder: link count and inode say nothing, bytes and kinds do."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = None if path.is_dir() else xxhash.xxh3_128_hexdigest(path.read_bytes())
    return found


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if layout.is_leftover(p.name))


@contextlib.contextmanager
def native_fault(fault: tuple[str, int, int]) -> Iterator[None]:
    _native._testing_faults([fault])
    try:
        yield
    finally:
        _native._testing_faults([])


class Session:
    """One engine, and the losses of its training so far."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.folder = Path(case["save_dir"])
        self.engine = training.make_engine(case)
        self.losses: list[str] = []
        self.turn = 0

    def train(self, steps: int = 1) -> None:
        start = len(self.losses)
        self.losses += training.train(self.case, self.engine, 0, start, start + steps)

    def save(self, tag: str) -> None:
        self.engine._nvme_saver._rungs.clear()  # each save tries the ways into the checkpoint as the first one does
        self.engine.save_checkpoint(str(self.folder), tag=tag, client_state={"micro": len(self.losses)})

    def load(self, tag: str) -> None:
        """Go back to a checkpoint, losses too."""
        _, state = self.engine.load_checkpoint(str(self.folder), tag=tag)
        del self.losses[state["micro"] :]

    def attempt(self, work: Any, *args: Any) -> dict[str, str] | None:
        try:
            work(*args)
        except NvmeResumeError as error:
            return {"type": type(error).__name__, "text": str(error)}
        return None

    def faulted_save(self, around: Any) -> dict[str, Any]:
        """A save that meets a fault, and whether everything after it is as it must be."""
        self.turn += 1
        tag = "again" if self.case["same_tag"] else f"try{self.turn}"
        before = contents(self.folder)
        with around:
            error = self.attempt(self.save, tag)
            late = self.attempt(self.engine.wait_for_checkpoint)
        report: dict[str, Any] = {"error": error, "late": late, "leftovers": leftovers(self.folder)}
        after = contents(self.folder)
        new = {k: v for k, v in after.items() if before.get(k, "") != v}
        report["gone"] = sorted(before.keys() - after.keys()) if error else []
        report["changed"] = sorted(new) if error else []
        report["older"] = sorted(
            k for k, v in before.items() if k.startswith("base") and after.get(k, "") != v
        )
        report["committed"] = (self.folder / tag / layout.manifest()).is_file() and (
            not self.case["same_tag"]
            or after[f"again/{layout.manifest()}"] != before.get(f"again/{layout.manifest()}")
        )
        self.train()
        report["next"] = self.attempt(self.save, f"good{self.turn}") or self.attempt(
            self.engine.wait_for_checkpoint
        )
        # Back to the one that was committed in spite of the fault, or to the one after it; by turns.
        target = tag if report["committed"] and self.turn % 2 else f"good{self.turn}"
        report["load"] = self.attempt(self.load, target)
        self.train()
        report["at_rest"] = self.attempt(self.engine.wait_for_checkpoint)
        report["leftovers_later"] = leftovers(self.folder)
        for name in (f"try{self.turn}", f"good{self.turn}"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return report

    def swap_files(self) -> list[str]:
        """Names in the swap folder, public and private."""
        return sorted(str(p) for p in Path(self.case["nvme_path"]).rglob("*"))

    def faulted_load(self, around: Any) -> dict[str, Any]:
        self.turn += 1
        engine, before, at = self.engine, training.digests(self.engine), len(self.losses)
        files, names = contents(self.folder), self.swap_files()
        with around:
            error = self.attempt(self.load, "base")
        report: dict[str, Any] = {"error": error, "checkpoint_same": contents(self.folder) == files}
        if error is not None:
            report["swap_files_same"] = self.swap_files() == names
            report["engine_same"] = training.digests(engine) == before
        self.train()
        report["load"] = self.attempt(self.load, "base")
        self.train(at - len(self.losses))
        report["digests_later_same"] = training.digests(engine) == before
        report["at_rest"] = self.attempt(engine.wait_for_checkpoint)
        return report


def main(path: str) -> None:
    case = json.loads(Path(path).read_text())
    out = Path(f"{case['out']}.0.json")
    result: dict[str, Any] = {"rounds": []}
    try:
        session = Session(case)
        session.train()
        session.save("base")
        if case["same_tag"]:
            session.save("again")
        session.engine.wait_for_checkpoint()
        load = case["what"] == "load"
        if load:
            session.train(2)
        one = session.faulted_load if load else session.faulted_save
        codes = itertools.cycle(case["codes"])
        for fault in case["native"]:
            report = one(native_fault(tuple(fault)))
            result["rounds"].append({"fault": fault, **report})
        for point in case.get("fill", []):
            report = one(filled(point, Path(case["save_dir"]).parent))
            result["rounds"].append({"fault": ["fill", point, errno.ENOSPC], **report})
        for nbytes in case.get("limits", []):
            report = one(limited(nbytes))
            result["rounds"].append({"fault": ["limit", nbytes, errno.EFBIG], **report})
        turn = case["first"]
        while case["stride"]:
            code = next(codes)
            disk = FaultyDisk(turn, code, lasting=case["lasting"])
            report = one(seam.replaced(disk))
            if disk.hit is None:
                result["calls"] = disk.calls
                break
            result["rounds"].append(
                {"fault": [turn, code, *disk.hit], "synced_again": disk.synced_again, **report}
            )
            turn += case["stride"]
        result["losses"] = session.losses
    except BaseException as error:
        result["error"] = {"type": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
        sys.stderr.write(result["error"]["trace"])
    out.write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(3 if "error" in result else 0)


if __name__ == "__main__":
    main(sys.argv[1])
