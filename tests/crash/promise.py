"""What must hold in a save folder after a crash, whatever the crash left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from nvme_resume import layout, manifest
from nvme_resume.config import Options
from nvme_resume.errors import NvmeResumeError
from nvme_resume.manifest import Extras, FileRecord, Manifest, RankEntry, RankRecord, Seal
from nvme_resume.storage import catalog, commit, records, transfer, verify
from nvme_resume.storage import disk as seam
from tests.crash import model
from tests.crash.model import Log, Mark

OPTIONS = Options()
SAVES = "ck"  # name of the save folder below the watched root


@dataclass
class Promise:
    """What the software had said by some step of the log."""

    kept: dict[str, str] = field(default_factory=dict)  # tag -> checkpoint that must be there
    maybe: dict[str, set[str]] = field(default_factory=dict)  # tag -> checkpoints in flight, or being removed
    newest: set[str] = field(default_factory=set)  # checkpoints that a load may take

    @property
    def facts(self) -> str:
        return f"kept {self.kept}, maybe {self.maybe}, newest {sorted(self.newest)}"


def promise_at(log: Log, prefix: int) -> Promise:
    """From the marks."""
    now = Promise()
    for mark in log.steps[:prefix]:
        if not isinstance(mark, Mark):
            continue
        if mark.what == "begin":
            now.maybe.setdefault(mark.tag, set()).add(mark.checkpoint_id)
            now.newest.add(mark.checkpoint_id)
        elif mark.what == "committed":
            now.kept[mark.tag] = mark.checkpoint_id
            now.newest = {mark.checkpoint_id}
            del now.maybe[mark.tag]
        elif mark.what == "removing":
            now.maybe.setdefault(mark.tag, set()).add(now.kept.pop(mark.tag))
        elif mark.what == "removed":
            del now.maybe[mark.tag]
    return now


class _Quick(seam.Disk):
    """For states that no power failure will hit."""

    def write(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        super().write(path, data, sync=False)

    def sync_file(self, path: Path) -> None:
        return

    def sync_folder(self, path: Path) -> None:
        return


def violations(log: Log, samples: int, *, two_renames: bool = False, first: int = 0) -> tuple[list[str], int]:
    """What went wrong in any state a crash may leave (in words), and how many different states were looked at.

    ``two_renames``: where folders cannot be exchanged a tag may be away until ``mend`` was there.
    """
    truths = {s.checkpoint_id: dict(s.truth) for s in log.steps if isinstance(s, Mark) and s.what == "begin"}
    look = _Look(truths, two_renames=two_renames)
    with tempfile.TemporaryDirectory(dir=_memory()) as place:
        pool = Path(place, "pool")
        pool.mkdir()
        return _violations(log, look, samples, first, Path(place, "state"), pool)


def _memory() -> str | None:
    """A file system in memory with room for some checkpoints, if there is one: thousands of folders are made."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and shutil.disk_usage(place).free > 1 << 30 else None


def _violations(
    log: Log, look: _Look, samples: int, first: int, folder: Path, pool: Path
) -> tuple[list[str], int]:
    found: list[str] = []
    seen: set[int] = set()
    for crash in model.crashes(log, SAVES, samples, first=first):
        promise = promise_at(log, crash.prefix)
        part = tuple((p, k) for p, k in crash.tree.items() if p == SAVES or p.startswith(f"{SAVES}/"))
        fingerprint = hash((part, promise.facts))
        if fingerprint in seen:
            continue
        seen.add(fingerprint)
        model.write(crash.tree, log.store, SAVES, folder, pool)
        with seam.replaced(_Quick()):
            wrong = [*look.wrong(folder, promise)]
        last = log.steps[crash.prefix - 1] if crash.prefix else None
        found += [f"after {crash.prefix} steps ({last}), {crash.how}: {w}" for w in wrong]
        shutil.rmtree(folder)
        if len(found) > 20:
            break
    return found, len(seen)


class _Look:
    """Looks at many states; at what can be seen of each only once."""

    def __init__(self, truths: dict[str, dict[str, str]], *, two_renames: bool) -> None:
        self._truths = truths
        self._two_renames = two_renames
        self._good: set[int] = set()  # states of save folders
        self._verified: set[int] = set()  # states of checkpoints

    def wrong(self, save_dir: Path, promise: Promise) -> Iterator[str]:
        """Everything that is wrong with a state, in words; leaves it mended, cleaned up and saved to."""
        try:
            if not self._two_renames:
                yield from self._now("at once", save_dir, promise)
            commit.mend(save_dir)
            yield from self._now("mended", save_dir, promise)
            for leftover in catalog.leftovers(save_dir):
                commit.recover(leftover)
            if left := catalog.leftovers(save_dir):
                yield f"stays for ever: {left[0].name}"
            yield from self._now("cleaned up", save_dir, promise)
        except (OSError, NvmeResumeError) as error:
            yield f"{type(error).__name__}: {error}"

    def _now(self, when: str, save_dir: Path, promise: Promise) -> Iterator[str]:
        state = hash((when == "cleaned up", _visible(save_dir), promise.facts))
        if state in self._good:
            return
        problems = [*self._wrong_now(save_dir, promise)]
        if not problems and when == "cleaned up":
            problems += _wrong_later(save_dir, promise)
        yield from (f"{when}: {problem}" for problem in problems)
        if not problems:
            self._good.add(state)

    def _wrong_now(self, save_dir: Path, promise: Promise) -> Iterator[str]:
        """Things that do not hold in a folder as it is."""
        latest = catalog.read_latest(save_dir)
        if latest is None:
            if promise.kept:
                yield "latest is gone"
        elif latest not in promise.kept.keys() | promise.maybe.keys():
            yield f"latest holds {latest!r}"
        elif catalog.look(save_dir, latest).problem is not None:
            yield f"latest names {latest}: {catalog.look(save_dir, latest).problem}"
        best = catalog.last_resumable(save_dir)
        if best is None:
            if promise.kept:
                yield "nothing to resume from"
        elif (chosen := records.read_manifest(best).checkpoint_id) not in promise.newest:
            yield f"{best.name} would be loaded, checkpoint {chosen}"
        for tag in (*promise.kept, *(t for t in promise.maybe if (save_dir / t).exists())):
            allowed = {promise.kept[tag]} if tag in promise.kept else set()
            allowed |= promise.maybe.get(tag, set())
            state = hash((_visible(save_dir / tag), tuple(sorted(allowed))))
            if state not in self._verified:
                problems = [*self._wrong_checkpoint(save_dir, tag, allowed)]
                yield from problems
                if not problems:
                    self._verified.add(state)
        for tag in catalog.tags(save_dir):
            if tag not in promise.kept and tag not in promise.maybe:
                yield f"{tag} is there"

    def _wrong_checkpoint(self, save_dir: Path, tag: str, allowed: set[str]) -> Iterator[str]:
        """One checkpoint, down to every byte."""
        folder = save_dir / tag
        try:
            head = records.read_manifest(folder)
            if head.checkpoint_id not in allowed:
                yield f"{tag} is {head.checkpoint_id}, not one of {sorted(allowed)}"
                return
            truth = self._truths[head.checkpoint_id]
            for rank in range(head.world_size):
                record, seal, _ = records.read_rank(folder, head, rank)
                if seal is not None:
                    verify.full(folder, seal.files, OPTIONS, rank=rank, tag=tag)
                for name in record.files:
                    if xxhash.xxh3_128_hexdigest((folder / name).read_bytes()) != truth[name]:
                        yield f"{tag}/{name} is not what was saved"
        except (OSError, NvmeResumeError) as error:
            yield f"{tag}: {type(error).__name__}: {error}"


def _visible(save_dir: Path) -> frozenset[tuple[str, int]]:
    """Names and inodes (which stand for contents: all are links to the pool) without leftovers."""
    found = set()
    todo = [str(save_dir)] if save_dir.is_dir() else []
    while todo:
        for entry in os.scandir(todo.pop()):
            if not layout.is_leftover(entry.name):
                is_folder = entry.is_dir()
                found.add((entry.path, 0 if is_folder else entry.inode()))
                if is_folder:
                    todo.append(entry.path)
    return frozenset(found)


def _wrong_later(save_dir: Path, promise: Promise) -> Iterator[str]:
    """The next saves, under a new tag and under one that may be there."""
    for tag, step in (("later", 10**6), (next(iter(promise.kept), "later"), 10**6 + 1)):
        save(save_dir, tag, f"{tag}{step}", step, sealed=True)
        found = catalog.last_resumable(save_dir)
        if found != save_dir / tag or catalog.read_latest(save_dir) != tag:
            yield f"a later save as {tag} is not the one to load: {found}"
    yield from (f"the later save leaves {p.name}" for p in catalog.leftovers(save_dir))


def stage(save_dir: Path, tag: str, checkpoint_id: str, step: int, *, sealed: bool) -> tuple[str, Manifest]:
    """A complete small checkpoint of one rank in its staging folder, durable as a rank leaves it."""
    staging = layout.staging(tag, checkpoint_id)
    folder, disk = save_dir / staging, seam.current()
    swap = layout.swap_path(0, "0_1.tensor.swp")
    contents = {name: f"{name} of {checkpoint_id}".encode() * 200 for name in (layout.model_states(0), swap)}
    for name, data in contents.items():
        disk.make_folder((folder / name).parent)
        (folder / name).write_bytes(data)
    seals = {name: transfer.hash_of(memoryview(data)) for name, data in contents.items()}
    record = RankRecord(
        checkpoint_id=checkpoint_id,
        tag=tag,
        rank=0,
        world_size=1,
        optimizer="o",
        master_dtype="float32",
        optim_file=layout.model_states(0),
        model_file=layout.model_states(0),
        sub_groups=(),
        files={
            name: FileRecord(size=s.size, digest=s.digest if sealed else None) for name, s in seals.items()
        },
    )
    extras = Extras(checkpoint_id=checkpoint_id, rank=0, micro_steps=step)
    records.write(folder, layout.rank_record(0), record)
    records.write(folder, layout.extras(0), extras)
    new = [*contents, layout.rank_record(0), layout.extras(0)]
    if sealed:
        records.write(folder, layout.seal(0), seal_of(record, seals))
        new.append(layout.seal(0))
    commit.sync_all([folder / name for name in new], commit.folders_of(folder))
    head = Manifest(
        checkpoint_id=checkpoint_id,
        tag=tag,
        global_steps=step,
        world_size=1,
        sealed=sealed,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        settings={},
        ranks=(
            RankEntry(rank=0, host="h", record=manifest.digest_of(record), extras=manifest.digest_of(extras)),
        ),
    )
    return staging, head


def seal_of(record: RankRecord, files: dict[str, manifest.FileSeal]) -> Seal:
    return Seal(
        checkpoint_id=record.checkpoint_id,
        rank=record.rank,
        record_digest=manifest.digest_of(record),
        files=files,
    )


def save(save_dir: Path, tag: str, checkpoint_id: str, step: int, *, sealed: bool) -> Path:
    """Stage and publish a small checkpoint."""
    staging, head = stage(save_dir, tag, checkpoint_id, step, sealed=sealed)
    return commit.publish(save_dir, staging, head, save_latest=True)
