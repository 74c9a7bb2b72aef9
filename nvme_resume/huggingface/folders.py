"""How the ranks of a training job build one ``checkpoint-N`` folder and make it appear at once.

Order, and why: (1) the ranks find out by looking which of them share the output folder; one of each place is its
publisher and owns it; (2) everything is written into a staging folder beside the final name; (3) whoever wrote on a
node makes it durable there (on a network file system only the client that wrote can); (4) a barrier that carries
errors; (5) each publisher gives the folder its name, durably; (6) only then old ones go.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from nvme_resume import layout
from nvme_resume.errors import NvmeResumeError, PeerError
from nvme_resume.peers import shared
from nvme_resume.places import Places
from nvme_resume.storage import catalog, commit, prune
from nvme_resume.storage import disk as seam
from nvme_resume.storage.ownership import Ownership

T = TypeVar("T")

TIMEOUT_SECONDS = 1800.0  # where no DeepSpeed configuration says otherwise
# In the folder while it is built: transformers 4.38 would stage and rename an empty one by itself.
_PLACEHOLDER = ".nvme_resume_is_saving"


class Folders:
    """What one rank knows of the output folders of its job.  Making one is collective, and so are its methods."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.peers = shared(timeout_seconds)
        self._places = Places(self.peers)
        self._owned = Ownership()
        atexit.register(self._owned.close)

    @contextlib.contextmanager
    def building(self, run_dir: Path, name: str, said: str) -> Iterator[Building]:
        """A staging folder for ``run_dir / name``, shared by the ranks that share ``run_dir``.

        ``said``: that folder in the user's words, which must be the same on every rank.

        It goes when the block raises.  Raises LockedError, StorageError or PeerError, the same on every rank.
        """
        peers, during = self.peers, f"start of {name}"

        def propose() -> tuple[str, str, str, bool]:
            seam.current().make_folder(run_dir)
            return uuid.uuid4().hex[:12], said, name, self._places.known(run_dir)

        proposals = peers.run(propose, during)
        peers.agree([p[1:3] for p in proposals], "output folder and step")
        place = self._places.of(run_dir, [p[3] for p in proposals])
        building = Building(self, run_dir, name, proposals[0][0], publisher=place.publisher)
        catalog.under_way.add(building.staging)
        try:
            peers.run(lambda: self._begin(building), during)
            yield building
        except BaseException as error:
            # A rank that did not answer may still be writing: the next save removes what is left then.
            if place.publisher and isinstance(error, NvmeResumeError) and not isinstance(error, PeerError):
                with contextlib.suppress(OSError):
                    seam.current().remove_tree(building.staging)
            raise
        finally:
            catalog.under_way.discard(building.staging)

    def _begin(self, building: Building) -> None:
        if building.publisher:
            self._owned.take(building.run_dir)
            seam.current().make_folder(building.folder)
            seam.current().write(building.folder / _PLACEHOLDER, b"", sync=False)


class Building:
    """One checkpoint folder that is being built."""

    def __init__(self, folders: Folders, run_dir: Path, name: str, save_id: str, *, publisher: bool) -> None:
        self.run_dir = run_dir
        self.final = run_dir / name
        self.staging = run_dir / layout.staging(
            name, save_id
        )  # what takes the place of ``run_dir`` meanwhile
        self.folder = self.staging / name
        self.publisher = publisher
        self._peers = folders.peers
        self._save_id = save_id

    def run(self, work: Callable[[], T], during: str) -> list[T]:
        """Do ``work`` on every rank; the same error on every rank when it fails on any."""
        return self._peers.run(work, during)

    def is_written(self, proof: str) -> None:
        """The Trainer is done here.  Before any rank makes it durable: what is listed then must stay.

        What somebody put under the final name beforehand (a subclass, a callback) comes along, unless a whole
        checkpoint is there, which has the file ``proof``: that one is replaced.
        """
        if not self.publisher:
            return
        seam.current().remove_tree(self.folder / _PLACEHOLDER)
        if (self.final / proof).exists():
            return
        for path in sorted(self.final.rglob("*")) if self.final.is_dir() else ():
            target = self.folder / path.relative_to(self.final)
            if path.is_file() and not target.exists() and path.name != catalog.INCOMPLETE:
                seam.current().make_folder(target.parent)
                shutil.copy2(path, target)

    def publish(self) -> int:
        """Make it durable, then give it its name; its size in bytes, of all places together.

        Raises the same error on every rank when any failed; then no publisher that had not done so yet has published.
        """
        name = self.final.name

        def make_durable() -> int:
            if not (self.publisher or self._peers.local_rank == 0):
                return 0
            # A background thread of the engine may be adding its hashes, durably and under such names; and the
            # placeholder may be seen late.
            names = (
                p for p in self.folder.rglob("*") if not layout.is_leftover(p.name) and p.name != _PLACEHOLDER
            )
            files = [p for p in names if p.is_file() and not p.is_symlink()]
            commit.sync_all(files, commit.folders_of(self.folder))
            return sum(p.stat().st_size for p in files) if self.publisher else 0

        sizes = self._peers.run(make_durable, f"fsync of {name}")

        def give_name() -> None:
            if not self.publisher:
                return
            commit.move_in(self.folder, self.final, self._save_id)
            with contextlib.suppress(OSError):
                seam.current().remove_tree(self.staging)

        self._peers.run(give_name, f"commit of {name}")
        return sum(sizes)

    def remove(self, names: Sequence[str]) -> None:
        """Remove older checkpoints, each at once.  No collective, and no error: the new one is committed."""
        if self.publisher:
            for name in names:
                prune.remove(self.run_dir, name)
