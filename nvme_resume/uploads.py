"""``"upload"``: committed checkpoints go to a URL in the background, behind everything else.

Each process that publishes a save folder uploads the parts of all ranks that share it.  A thread of its own, so that
the hashes of later saves do not wait behind the network, and no collectives there.  What fails is said at once, does
not stop the training, is raised by ``wait_for_checkpoint`` and tried again with the next save.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from nvme_resume import errors, logs
from nvme_resume.config import Options
from nvme_resume.errors import ConfigError, NvmeResumeError
from nvme_resume.peers import Peers
from nvme_resume.places import Place
from nvme_resume.storage import catalog, remote, upload
from nvme_resume.storage.background import Background, Cancelled, Gate, Task, behind
from nvme_resume.storage.catalog import Saved
from nvme_resume.storage.limit import Limit
from nvme_resume.storage.upload import Part

log = logs.logger


def check(options: Options, *, uses_nvme: bool) -> None:
    """ConfigError when the ``upload`` of the options cannot work here.  Asks no server."""
    if options.upload is None:
        return
    remote.check(options.upload)
    if not uses_nvme:
        raise ConfigError(
            '"upload" is for checkpoints of state on NVMe',
            expected='"offload_optimizer" or "offload_param" with "device": "nvme"',
            found="neither",
            hint='leave "upload" out',
        )


class Uploads:
    """All uploads of one engine."""

    def __init__(self, options: Options, peers: Peers, training: Gate, limit: Limit) -> None:
        self._options = options
        self._peers = peers
        self._url = options.upload
        self._work = Background(Gate(training))
        self._limit = limit
        self._mutex = threading.Lock()
        self._tasks: list[Task] = []
        self._failed: dict[Path, tuple[Part, str]] = {}  # to be tried again
        self._errors: dict[Path, NvmeResumeError] = {}  # not raised yet
        self._uploaded = -1  # number of the newest part that went
        self._numbers: dict[Path, int] = {}
        if self._url is not None:
            _before_threads_end(self._work.close)

    @property
    def wanted(self) -> bool:
        """Is anything to be uploaded?"""
        return self._url is not None

    def behind(self) -> bool:
        """Do too many uploads of this rank wait?"""
        return behind(self._tasks)

    def admit(self, *, any_behind: bool) -> bool:
        """Is what is saved next to be uploaded?  The same everywhere; ``any_behind``: some rank's uploads or hashes."""
        if self._url is None:
            return False
        if not any_behind:
            return True
        if self._peers.rank == 0:
            log.warning(
                "the checkpoint that is saved now is not uploaded to %s: earlier ones are still on their way. "
                "Save less often, or look at the network (wait_for_checkpoint() uploads it if no later one was).",
                self._url,
            )
        return False

    def begin(self, saved: Saved, place: Place | None, *, latest: bool, below: str | None = None) -> None:
        """Upload what was just committed there, and what failed before.  On every rank, or none; returns at once.

        ``below``: the save folder is one of several, which has that name under the URL, and its other files go along.
        """
        if self._url is None or place is None or not place.publisher:
            return
        publishes = place.ranks[0] == 0
        save_dir, tag, checkpoint_id, _ = saved
        others = () if below is None else upload.beside(save_dir, tag, everything=publishes)
        part = Part(save_dir, tag, checkpoint_id, place.ranks, publishes, latest, others)
        url = self._url if below is None else f"{self._url.rstrip('/')}/{below}"
        with self._mutex:
            self._failed.pop(part.folder, None)  # saved anew
            again, self._failed = list(self._failed.values()), {}
            self._numbers[part.folder] = max(self._numbers.values(), default=0) + 1
            for job in [*again, (part, url)]:
                self._submit(*job)

    def _submit(self, part: Part, url: str) -> None:
        self._tasks = [t for t in self._tasks if not t.wait(0)]
        what = f"upload of {part.folder} to {url}"
        task = self._work.submit(
            what,
            partial(self._run, part, url, what),
            self._options.timeout_seconds,
            awaited=True,
            at_end=catalog.use(part.folder),
        )
        self._tasks.append(task)

    def owed(self) -> bool:
        """Has any upload of this rank failed, and was not tried again?"""
        return bool(self._failed)

    def try_again(self) -> None:
        """Those, now.  Returns at once."""
        with self._mutex:
            again, self._failed = list(self._failed.values()), {}
            for job in again:
                self._submit(*job)

    def ended(self, seconds: float) -> bool:
        """True when nothing is under way any more, within the time."""
        deadline = time.monotonic() + seconds
        with self._work.gate.waited_for():
            return all(task.wait(max(0.0, deadline - time.monotonic())) for task in list(self._tasks))

    def raise_failure(self) -> None:
        """Raise what went wrong since it was asked last."""
        with self._mutex:
            found, self._errors = list(self._errors.values()), {}
        if found:
            raise found[0]

    def close(self) -> None:
        """Wait for what is under way, within bounds."""
        self._work.close()

    # ---- in the background ----

    def _run(self, part: Part, url: str, what: str) -> None:
        start = time.monotonic()
        number = self._numbers.get(part.folder, 0)
        try:
            if number < self._uploaded:  # a later one is there
                part = replace(part, latest=False)
            gate = self._work.gate
            to = remote.Remote(url, gate.breathe, partial(self._limit.spend, gate=gate))
            moved = upload.upload(part, to, self._options.timeout_seconds)
        except Cancelled:
            raise
        except Exception as error:
            if not catalog.is_still(part.folder, part.checkpoint_id):
                log.info("%s ends: the checkpoint was removed or replaced", what)
                self._forget(part.folder)
                return
            problem = errors.of(error, what)
            log.error(  # noqa: TRY400 - no trace for users
                "%s failed; training goes on, and it is tried again with the next save: %s", what, problem
            )
            with self._mutex:
                self._failed[part.folder] = part, url
                self._errors[part.folder] = problem
            return
        self._forget(part.folder)
        self._uploaded = max(self._uploaded, number)
        log.info(
            "%s: %s of ranks %s, %.1f MiB in %d files in %.2f s%s",
            f"{url}/{part.tag}",
            "all" if part.publishes else "the part",
            list(part.ranks),
            moved.nbytes / (1 << 20),
            moved.files,
            time.monotonic() - start,
            "; complete" if part.publishes else "",
        )

    def _forget(self, folder: Path) -> None:
        with self._mutex:
            self._errors.pop(folder, None)


def _before_threads_end(work: Callable[[], None]) -> None:
    """At the end of the process, while threads can still be started, which asyncio and fsspec do.

    ``atexit`` is too late for that: ``concurrent.futures`` has closed by then.  It closes by the same function, which
    Python does not document (3.10 to 3.14); without it ``atexit`` has to do.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the process is ending already
            register(work)
