"""``load_checkpoint("s3://...")``: each node downloads the parts of its own ranks, then loads as usual.

Into a private folder on the file system of the swap files, so that the load links what was downloaded instead of
copying it.  What a cut download left there is compared and gone on with.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from nvme_resume import config, layout, logs
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, CorruptError, NvmeResumeError
from nvme_resume.manifest import Manifest, same_checkpoint
from nvme_resume.peers import Peers
from nvme_resume.places import Place, Places
from nvme_resume.storage import catalog, download, locks, records
from nvme_resume.storage import disk as seam
from nvme_resume.storage.background import Background, over
from nvme_resume.storage.remote import Remote

log = logs.logger
T = TypeVar("T")

_NAME_CHARACTERS = 40


class Downloads:
    """Loads from URLs of one engine."""

    def __init__(self, options: Options, peers: Peers, places: Places, nvme_paths: Sequence[Path]) -> None:
        self._options = options
        self._peers = peers
        self._places = places
        self._nvme_paths = nvme_paths
        self._work: Background | None = None  # what runs in a thread at present

    def load(self, url: str, tag: str | None, load: Callable[[str, str], T]) -> T:
        """Choose, download, and give folder and tag to ``load``, which must be collective like this.

        Without a ``tag`` one that turns out damaged is skipped.  Raises the same error on every rank.
        """
        damaged: dict[str, CorruptError] = {}
        while True:
            try:
                name, folder = self._choose(url, tag, damaged)
                with self._downloaded(url, name, folder) as here:
                    return load(str(here), name)
            except CorruptError as error:
                # Of a checkpoint that was chosen; "name" is new each time.
                if tag is not None or error.tag is None or error.tag in damaged:
                    raise
                damaged[error.tag] = error
            except NvmeResumeError:
                for first in damaged.values():
                    raise first from None  # nothing else is there
                raise

    def _choose(self, url: str, tag: str | None, damaged: dict[str, CorruptError]) -> tuple[str, Path]:
        """Rank 0 looks; each rank's folder for it."""
        peers = self._peers

        def ask() -> str | None:
            return download.choose(Remote(url), tag, damaged) if peers.rank == 0 else None

        agreed = peers.run(lambda: (url, tag), "choice of the checkpoint")
        peers.agree(agreed, "URL and tag")
        name = self._in_a_thread(ask, f"choice of the checkpoint at {url}")[0]
        assert name is not None
        return name, self._folder(url)

    def _folder(self, url: str) -> Path:
        if self._options.download_dir is not None:
            base = Path(self._options.download_dir)
        elif self._nvme_paths:
            base = self._nvme_paths[0] / "zero_stage_3" / layout.DOWNLOADS
        else:
            raise ConfigError(
                "nowhere to download to: this engine has no nvme_path",
                expected=f'"{config.KEY}": {{"download_dir": ...}}',
                hint="name a folder on a local disk",
            )
        url = url.rstrip("/")
        readable = "".join(c if c.isalnum() or c in "-_" else "-" for c in url)[-_NAME_CHARACTERS:].strip("-")
        return base / f"{readable}.{xxhash.xxh3_64_hexdigest(url.encode())}"

    @contextlib.contextmanager
    def _downloaded(self, url: str, tag: str, folder: Path) -> Iterator[Path]:
        """What this node needs of ``tag`` lies there; it goes after a load, unless the user named the place."""
        keep = self._options.download_dir is not None
        place = self._places.make(folder, "look at the folder for downloads")
        with contextlib.ExitStack() as undo:
            self._own(folder, place, undo, keep=keep)
            self._in_a_thread(
                lambda: self._bring(url, tag, folder, place) if place.publisher else None,
                f"download of {url}/{tag}",
            )
            yield folder
            if place.publisher and not keep:
                with contextlib.suppress(OSError):
                    seam.current().remove_tree(folder)

    def _own(self, folder: Path, place: Place, undo: contextlib.ExitStack, *, keep: bool) -> None:
        def take() -> None:
            if not place.publisher:
                return
            lock = locks.take(
                folder.with_name(f"{folder.name}{layout.OWNER_LOCK}"),
                f"the folder for downloads {folder}",
                hint='wait for it, or set another "download_dir"',
            )
            undo.callback(lock.close)
            if not keep:
                _remove_others(folder)

        self._peers.run(take, "look at the folder for downloads")

    def _bring(self, url: str, tag: str, folder: Path, place: Place) -> None:
        """By one process of each node."""
        start = time.monotonic()
        remote = Remote(url, self._breathe)
        head = download.head_of(remote, tag)
        world_size = self._peers.world_size
        wanted = [catalog.read_by(rank, world_size)(head.world_size) for rank in place.ranks]
        ranks = sorted(set().union(*wanted))
        _remove_older(folder, head, keep=self._options.download_dir is not None)
        nbytes = download.fetch(remote, head, ranks, folder, self._options)
        log.info(
            "%s/%s: %.1f MiB of saved ranks %s came to %s in %.2f s",
            url, tag, nbytes / (1 << 20), ranks, folder, time.monotonic() - start,
        )  # fmt: skip

    def _breathe(self) -> None:
        work = self._work
        if work is not None:
            work.gate.check()

    def _in_a_thread(self, work: Callable[[], T], during: str) -> list[T]:
        """``work`` on every rank, however long it takes: the ranks hear of each other meanwhile."""
        background = self._work = Background()
        results: list[T] = []
        try:
            task = background.submit(during, lambda: results.append(work()), 0.0, awaited=True)

            self._peers.together(partial(over, [task]), during)
        finally:
            background.close()
            self._work = None
        return self._peers.run(lambda: results[0], during)


def _remove_others(folder: Path) -> None:
    """Downloads of other URLs that nobody goes on with."""
    for path in folder.parent.iterdir():
        lock = path.with_name(f"{path.name}{layout.OWNER_LOCK}")
        if path.is_dir() and path != folder and not locks.is_held(lock):
            seam.current().remove_tree(path)


def _remove_older(folder: Path, head: Manifest, *, keep: bool) -> None:
    """Other checkpoints of this URL (``keep``: they stay), and one of the same tag that was replaced there since."""
    staging = layout.staging(head.tag, head.checkpoint_id)
    for path in folder.iterdir():
        if path.name == staging or (path.name == head.tag and _holds(path, head)):
            continue
        if not keep or path.name == head.tag or layout.is_leftover(path.name):
            seam.current().remove_tree(path)


def _holds(path: Path, head: Manifest) -> bool:
    try:
        return same_checkpoint(records.read_manifest(path), head)
    except NvmeResumeError:
        return False
