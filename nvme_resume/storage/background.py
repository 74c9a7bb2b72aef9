"""Work that goes on while training does: one thread an engine, and a gate through which its I/O passes.

No collectives here, ever: what went wrong is kept and raised on the training's own thread, at the next call that all
ranks make.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from nvme_resume import _native, errors, logs
from nvme_resume.errors import NvmeResumeError

log = logs.logger
Cancelled = _native.Cancelled

_CANCEL_SECONDS = 10.0
_BREATH_SECONDS = 0.005
_MOST_WAITING = 2


class Gate:
    """Background transfers pause here while the training uses its swap files."""

    def __init__(self, training: Gate | None = None) -> None:
        """``training``: the gate that knows when the training uses its swap files, where it is not this one."""
        self._training = training or self
        self._lock = threading.Lock()
        self._running: set[_native.Transfer] = set()
        self._busy = False
        self._waited_for = 0
        self._closed = False

    @property
    def urgent(self) -> bool:
        """Is the training waiting for what runs here?"""
        return self._waited_for > 0

    def busy(self, now: bool) -> None:
        """The training has requests of its own under way, or no longer."""
        if self._busy is not now:
            self._busy = now
            with self._lock:
                self._apply()

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """No pauses while the training's thread waits for the background."""
        with self._lock:
            self._waited_for += 1
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._waited_for -= 1
                self._apply()

    @contextlib.contextmanager
    def running(self, transfer: _native.Transfer) -> Iterator[None]:
        """Pass ``transfer`` through the gate.  _native.Cancelled when the gate is closed."""
        with self._lock:
            if self._closed:
                raise _native.Cancelled
            self._running.add(transfer)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(transfer)

    def breathe(self) -> None:
        """Between two blocks of a transfer that is not the copier's: wait while the training uses its swap files."""
        while self._training._busy and not self._waited_for and not self._closed:
            time.sleep(_BREATH_SECONDS)
        self.check()

    def check(self) -> None:
        """_native.Cancelled when the gate is closed (for waits that are no transfers)."""
        if self._closed:
            raise _native.Cancelled

    def close(self) -> None:
        """Cancel what runs; nothing new gets through."""
        with self._lock:
            self._closed = True
            for transfer in self._running:
                transfer.cancel()

    def _apply(self) -> None:
        for transfer in self._running:
            transfer.set_paused(self._busy and not self._waited_for)


class Task:
    """One piece of background work.

    ``awaited``: whoever submitted it waits for it and raises its error; else the next call of the engine does.
    ``at_end`` is called when it has ended, also when it was cancelled before it began; it must not raise.
    """

    def __init__(
        self,
        what: str,
        work: Callable[[], object],
        exit_seconds: float,
        *,
        awaited: bool = False,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.what = what
        self.awaited = awaited
        self.reported = False
        self.exit_seconds = exit_seconds
        self.error: NvmeResumeError | None = None
        self.cancelled = False
        self._work = work
        self._at_end = at_end or _nothing
        self._done = threading.Event()

    def run(self) -> None:
        """Do the work; never raises."""
        try:
            if not self.cancelled:
                self._work()
        except _native.Cancelled:
            self.cancelled = True
        except Exception as error:
            self.error = errors.of(error, self.what)
        finally:
            self._at_end()
            self._work = self._at_end = _nothing  # frees what they refer to
            self._done.set()

    def wait(self, seconds: float | None = None) -> bool:
        """True when it has ended within the time."""
        return self._done.wait(seconds)


def over(tasks: Sequence[Task], seconds: float) -> bool:
    """True when all have ended within the time, together; then what went wrong with the first that failed is raised."""
    deadline = time.monotonic() + seconds
    if not all(task.wait(max(0.0, deadline - time.monotonic())) for task in tasks):
        return False
    for task in tasks:
        task.reported = True
    for task in tasks:
        if task.error is not None:
            raise task.error
    return True


def behind(tasks: Sequence[Task]) -> bool:
    """Are so many under way that one more would only wait, and keep a checkpoint from being removed?"""
    return sum(not task.wait(0) for task in tasks) > _MOST_WAITING


def _nothing() -> None:
    return


class Background:
    """Runs tasks in order, one at a time, in a daemon thread; the end of the process waits for them, within bounds."""

    def __init__(self, gate: Gate | None = None) -> None:
        """``gate``: one that knows more than a fresh one."""
        self.gate = gate or Gate()
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._tasks: list[Task] = []
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def submit(
        self,
        what: str,
        work: Callable[[], object],
        exit_seconds: float,
        *,
        awaited: bool = False,
        at_end: Callable[[], None] | None = None,
    ) -> Task:
        """Queue ``work``.  ``what`` names it in messages; ``exit_seconds``: how long the process's end waits for it."""
        task = Task(what, work, exit_seconds, awaited=awaited, at_end=at_end)
        self._tasks.append(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="nvme_resume", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._queue.put(task)
        return task

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task

    def raise_failure(self) -> None:
        """Raise what a finished task left that nobody waits for, once.  Others that failed as well are logged."""
        failed = self._take_failures(awaited=False)
        for error in failed[1:]:
            log.error("%s", error)
        if failed:
            raise failed[0]

    def _take_failures(self, *, awaited: bool) -> list[NvmeResumeError]:
        failed = [t for t in self._tasks if t.wait(0) and not t.reported and (awaited or not t.awaited)]
        found = [t.error for t in failed if t.error is not None]
        for task in failed:
            task.reported = True
        self._tasks = [t for t in self._tasks if not (t.wait(0) and t.reported)]
        return found

    def pending(self) -> int:
        """Tasks that have not ended."""
        return sum(not t.wait(0) for t in self._tasks)

    def finish(self) -> None:
        """Wait for everything that is queued; raise what went wrong."""
        self.wait_for(self._tasks)
        self.raise_failure()

    def finish_these(self, *tasks: Task) -> None:
        """Wait for some awaited tasks; raise what went wrong with the first that failed, however often it is asked."""
        self.wait_for(tasks)
        over(tasks, 0.0)

    def wait_for(self, tasks: Sequence[Task]) -> None:
        """Until these have ended, however."""
        with self.gate.waited_for():
            for task in tasks:
                task.wait()

    def drop(self, tasks: Sequence[Task]) -> None:
        """Nobody wants the results of these any more: skip those that wait, wait for the one that runs."""
        for task in tasks:
            task.cancelled = True
        self.wait_for(tasks)
        for task in tasks:
            task.reported = True

    def close(self) -> None:
        """Wait for what is queued, each task as long as it may take, then cancel the rest and say what failed."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return  # a forked child, which has no such thread
        start = time.monotonic()
        with self.gate.waited_for():
            for task in self._tasks:
                task.wait(max(0.0, start + task.exit_seconds - time.monotonic()))
        for task in self._tasks:
            if not task.wait(0):
                log.warning(
                    "%s was not finished within %.0f s at the end of the process",
                    task.what,
                    task.exit_seconds,
                )
                task.cancelled = True
        self.gate.close()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CANCEL_SECONDS)
            self._thread = None
        for error in self._take_failures(awaited=True):
            log.error("%s", error)
