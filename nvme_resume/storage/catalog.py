"""Which checkpoints a save folder holds, and which one a load means."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nvme_resume import layout
from nvme_resume.errors import ConfigError, CorruptError, NoCheckpointError, NvmeResumeError
from nvme_resume.storage import disk as seam
from nvme_resume.storage import records, verify

INCOMPLETE = (
    "checkpoint-is-incomplete.txt"  # Hugging Face's mark of a just-in-time checkpoint that was cut short
)

LONGEST_LATEST = 4096  # bytes


def read_latest(save_dir: Path) -> str | None:
    """The tag that ``latest`` names, or None when there is no such file.  CorruptError when it cannot be read."""
    path = save_dir / layout.LATEST
    if not path.is_file():
        return None
    try:
        return seam.current().read(path, LONGEST_LATEST).decode("utf-8", "replace").strip()
    except OSError as error:
        raise CorruptError(
            f"the file that names the newest checkpoint cannot be read: {error.strerror or error}",
            path=str(path),
            hint="remove it, or name a tag",
        ) from error


def tags(save_dir: Path) -> list[str]:
    """Folders that may be checkpoints, oldest first."""
    if not save_dir.is_dir():
        return []
    found = [
        p
        for p in save_dir.iterdir()
        if p.is_dir()
        and not layout.is_leftover(p.name)
        and ((p / layout.RECORDS).is_dir() or any(p.glob("*_model_states.pt")))
    ]
    return [p.name for p in sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name))]


def beside(save_dir: Path, tag: str) -> list[str]:
    """Files that others than DeepSpeed put beside a tag folder (a Trainer's states and weights), as relative names."""
    paths = sorted(save_dir.rglob("*")) if save_dir.is_dir() else []
    files = [p.relative_to(save_dir).as_posix() for p in paths if p.is_file() and not p.is_symlink()]
    return beside_of(files, {tag, *tags(save_dir)})


def beside_of(names: Iterable[str], tags: Container[str]) -> list[str]:
    """The same of the files below a save folder wherever it lies: no checkpoints, no ``latest``, nothing hidden."""
    parts = {name: name.split("/") for name in names}
    return [
        name
        for name, parts in parts.items()
        if name != layout.LATEST and parts[0] not in tags and not any(part.startswith(".") for part in parts)
    ]


# Which saved ranks' files to look at, given how many there are: all, or those that others do not look at (or cannot
# see, on disks of their own).
Share = Callable[[int], Iterable[int]]

_use_lock = threading.Lock()
_uses: Counter[str] = (
    Counter()
)  # real paths of checkpoints that are being copied elsewhere, or added to, or kept
under_way: set[Path] = set()  # staging folders of this process's own saves


def use(path: Path) -> Callable[[], None]:
    """Keep a checkpoint from being removed, until what is returned is called, once."""
    key = os.path.realpath(path)  # however somebody writes it
    _count(key, 1)
    return partial(_count, key, -1)


def _count(key: str, change: int) -> None:
    with _use_lock:  # += is no single step, and threads come and go
        _uses[key] += change
        if not _uses[key]:
            del _uses[key]


def is_used(path: Path) -> bool:
    """May it not be removed?  Nor the folder that it lies in."""
    key = os.path.realpath(path)
    with _use_lock:
        return any(key in (used, os.path.dirname(used)) for used in _uses)  # noqa: PTH120


class Entry(NamedTuple):
    """One folder that may be a checkpoint.

    ``step`` is -1 where only DeepSpeed's files could say it; ``problem`` is None for a complete checkpoint, as far as
    records and sizes tell.  Plain data: ranks send each other theirs.
    """

    tag: str
    step: int = -1
    ours: bool = False
    problem: str | None = None
    checkpoint_id: str = ""


class Saved(NamedTuple):
    """A checkpoint that this run has just committed.  ``sealing``: its ranks are writing their hashes, or have."""

    save_dir: Path
    tag: str
    checkpoint_id: str
    sealing: bool

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return self.save_dir / self.tag


def share_of(rank: int, world_size: int) -> Share:
    """A rank's part of the work when every rank looks at some files."""
    return lambda saved: range(rank, saved, world_size)


def read_by(rank: int, world_size: int) -> Share:
    """The saved ranks whose files a rank reads when it resumes: its own, or, in another world size, any."""
    return lambda saved: (rank,) if saved == world_size else range(saved)


def share_here(save_dir: Path, tag: str, rank: int) -> Share:
    """What must lie in a folder that may be one node's own: the files of this rank, and of all that have a record."""
    folder = save_dir / tag
    return lambda saved: [r for r in range(saved) if r == rank or (folder / layout.rank_record(r)).is_file()]


def look(save_dir: Path, tag: str, share: Share = range) -> Entry:
    """Is this tag complete?  Reads records and asks for sizes; no hashes."""
    folder = save_dir / tag
    if not folder.is_dir():
        return Entry(tag, problem="there is no such folder")
    if (folder / INCOMPLETE).exists():
        return Entry(tag, problem=f"{INCOMPLETE} is there")
    try:
        if not records.has_manifest(folder):
            return Entry(tag)  # plain DeepSpeed's: its loader knows what it needs
        head = records.read_manifest(folder)
        if head.tag != tag:
            return Entry(tag, ours=True, problem=f"it holds tag {head.tag}")
        entry = Entry(tag, head.global_steps, ours=True, checkpoint_id=head.checkpoint_id)
        for saved in share(head.world_size):
            record, _, _ = records.read_rank(folder, head, saved)
            verify.structure(folder, record.files, rank=saved, tag=tag)
    except (NvmeResumeError, OSError) as error:
        return Entry(tag, ours=True, problem=str(error))
    return entry


def entries(save_dir: Path, share: Share = range) -> list[Entry]:
    """All tags, newest first: by step where the manifest tells it, then by the folder's time."""
    found = [look(save_dir, tag, share) for tag in tags(save_dir)][::-1]
    return sorted(found, key=lambda e: e.step, reverse=True)


def explicit(load_dir: Path, tag: str | int) -> str:
    """The tag somebody asked for.  Raises ConfigError or NoCheckpointError."""
    wanted = str(tag)
    if not layout.valid_tag(wanted):
        raise ConfigError("not a usable tag", tag=wanted, expected="one plain folder name")
    if not (load_dir / wanted).is_dir():
        there = tags(load_dir)
        raise NoCheckpointError(
            "no such checkpoint",
            tag=wanted,
            path=str(load_dir / wanted),
            hint=f"tags there: {', '.join(there) or 'none'}",
        )
    return wanted


def latest(load_dir: Path, share: Share = range) -> Entry | None:
    """The entry that ``latest`` names; None without that file."""
    try:
        tag = read_latest(load_dir)
    except CorruptError as error:
        return Entry(layout.LATEST, problem=str(error))
    if tag is None:
        return None
    if not layout.valid_tag(tag):
        return Entry(tag[:80], problem="that is no tag")
    return look(load_dir, tag, share)


def others(load_dir: Path, share: Share = range) -> list[Entry]:
    """What a load may fall back to when ``latest`` fails: checkpoints of ours, newest first, complete or not."""
    return [e for e in entries(load_dir, share) if e.ours]


def combine(found: Sequence[Sequence[Entry]]) -> list[Entry]:
    """What all ranks together found, in the order of the first: a tag is complete if it is so for every rank."""
    order = list(dict.fromkeys(e.tag for rank in found for e in rank))
    combined = []
    for tag in order:
        of_ranks = [next((e for e in rank if e.tag == tag), None) for rank in found]
        entry = next(e for e in of_ranks if e is not None)
        problem = next((e.problem for e in of_ranks if e is not None and e.problem is not None), None)
        absent = [r for r, e in enumerate(of_ranks) if e is None]
        if problem is None and absent:
            problem = f"ranks {absent} do not have it"
        ids = {e.checkpoint_id for e in of_ranks if e is not None}
        if problem is None and len(ids) > 1:
            problem = f"the ranks see {len(ids)} different checkpoints of that name"
        combined.append(entry._replace(problem=problem))
    return combined


def is_still(folder: Path, checkpoint_id: str) -> bool:
    """Does the folder hold that checkpoint, and not another one or none?  A damaged one is not gone."""
    try:
        return records.read_manifest(folder).checkpoint_id == checkpoint_id
    except NvmeResumeError:
        return folder.is_dir()


def deserves_latest(save_dir: Path, step: int) -> bool:
    """Is ``latest`` to name a checkpoint of this step?  Not where it names a committed one of a later step."""
    named = latest(save_dir, lambda _: ())  # other nodes may have the rest of its files
    return named is None or named.problem is not None or named.step <= step


def last_resumable(save_dir: Path) -> Path | None:
    """The folder that a load without a tag would take, or None.  Structure only: no hashes are compared."""
    first = latest(save_dir)
    if first is not None and first.problem is None:
        return save_dir / first.tag
    found = next((e for e in others(save_dir) if e.problem is None), None)
    return None if found is None else save_dir / found.tag


def leftovers(save_dir: Path) -> list[Path]:
    """What interrupted saves left behind; not what this process is writing (another engine of it may be)."""
    if not save_dir.is_dir():
        return []
    busy = {path.resolve() for path in under_way}
    return sorted(p for p in save_dir.iterdir() if layout.is_leftover(p.name) and p.resolve() not in busy)
