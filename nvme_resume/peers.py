"""The other ranks: agree, carry errors, never wait for ever.

Uses a gloo group of its own, so that it works beside NCCL, does not disturb the training's collectives and
can be given its own timeout.  Every method but ``agree`` is collective: all ranks call it, in the same order, from
the main thread.  Knows torch.distributed, nothing of DeepSpeed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nvme_resume import errors
from nvme_resume.errors import NvmeResumeError, PeerError

T = TypeVar("T")
_POLL_SECONDS = 0.5


class Peers:
    """All ranks of the training job."""

    def __init__(self, timeout_seconds: float) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.rank = 0 if not (dist.is_available() and dist.is_initialized()) else dist.get_rank()
        self.world_size = 1 if self.alone else dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.host = socket.gethostname()
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group = None if self.alone else dist.new_group(backend="gloo", timeout=self._timeout)

    def exchange(self, value: Any, error: NvmeResumeError | None, during: str) -> list[Any]:
        """Every rank's value, or the same exception type on every rank when any rank brought an error.

        ``value`` must be JSON-like plain data.  Raises PeerError naming the ranks that did not arrive within
        the timeout.
        """
        mine = (value, None if error is None else (type(error).__name__, error.message, error.facts()))
        everyone = [mine] if self.alone else self._gather(mine, during)
        failures = [(rank, packed) for rank, (_, packed) in enumerate(everyone) if packed is not None]
        if not failures:
            return [v for v, _ in everyone]
        rank, (kind, message, facts) = failures[0]
        if error is not None and rank == self.rank:
            if error.rank is None:
                error.rank = self.rank
            raise error
        others = f" (ranks {[r for r, _ in failures]} failed)" if len(failures) > 1 else ""
        facts = {**facts, "rank": rank if facts.get("rank") is None else facts["rank"]}
        raise _kind(kind)(f"{message}{others}", **facts) from error

    def run(self, work: Callable[[], T], during: str) -> list[T]:
        """Do ``work`` on every rank, then exchange results or errors."""
        value: T | None = None
        error: NvmeResumeError | None = None
        try:
            value = work()
        except Exception as caught:
            error = errors.of(caught, during)
        return self.exchange(value, error, during)

    def together(self, wait: Callable[[float], bool], during: str) -> None:
        """Call ``wait`` (at most that many seconds; is it over?) until it is over on every rank.

        However long it takes: the ranks hear of each other meanwhile.  Raises what any rank's ``wait`` raised.
        """
        over = self.run(partial(wait, 0.0), during)
        while not all(over):
            over = self.run(partial(wait, _POLL_SECONDS), during)

    def any(self, mine: bool) -> bool:
        """Does any rank say yes?  Cheap: one all-reduce of a byte.  PeerError when a rank is gone."""
        if self.alone:
            return mine
        said = torch.tensor([mine], dtype=torch.uint8)
        try:
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise PeerError(f"a rank is gone: {error}", rank=self.rank) from error
        return bool(said.item())

    def agree(self, values: Sequence[Any], what: str) -> None:
        """PeerError on every rank unless all ranks brought the same value.  The values were exchanged already."""
        for rank, other in enumerate(values):
            if other != values[0]:
                raise PeerError(
                    f"ranks disagree on {what}",
                    rank=rank,
                    expected=f"{values[0]!r} (rank 0)",
                    found=repr(other),
                    hint=f"call with the same {what} on every rank",
                )

    def _gather(self, mine: Any, during: str) -> Sequence[Any]:
        try:
            # Names who is missing; all_gather alone would only say "timed out".
            dist.monitored_barrier(group=self._group, timeout=self._timeout, wait_all_ranks=True)
            gathered: list[Any] = [None] * self.world_size
            dist.all_gather_object(gathered, mine, group=self._group)
        except ValueError as error:
            raise PeerError(
                f"{during} needs the other ranks, but the process group is gone: {error}",
                rank=self.rank,
                hint="call torch.distributed.destroy_process_group() after the last call of the engine",
            ) from error
        except RuntimeError as error:
            raise PeerError(
                f"not all ranks arrived within {self._timeout.total_seconds():.0f} s during {during}: {error}",
                rank=self.rank,
                hint="look at the log of the ranks named; a rank that died takes the job with it",
            ) from error
        return gathered


_shared: dict[float, tuple[Any, Peers]] = {}


def shared(timeout_seconds: float) -> Peers:
    """The ranks of the present job, known already if somebody asked before.  Collective the first time."""
    started = dist.is_available() and dist.is_initialized()
    job = dist.group.WORLD if started else None
    if timeout_seconds not in _shared or _shared[timeout_seconds][0] is not job:
        _shared[timeout_seconds] = job, Peers(timeout_seconds)
    return _shared[timeout_seconds][1]


def _kind(name: str) -> type[NvmeResumeError]:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, NvmeResumeError) else NvmeResumeError
