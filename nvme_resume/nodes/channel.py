"""Two ranks and a gloo group of their own: messages, and blocks of bytes.

Used from a background thread, so it keeps to what is safe there: point-to-point operations of the group object itself,
which ``destroy_process_group`` at the end of a program does not take away.  A group that has failed once stays broken:
make another.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nvme_resume.errors import CorruptError, PeerError

_LONGEST_MESSAGE = 1 << 30  # bytes
_LENGTH_BYTES = 8
_made: Counter[tuple[int, int]] = (
    Counter()
)  # how many channels there were between two ranks: the same on both


class Node(NamedTuple):
    """One place where ranks save, by the rank that publishes there."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


class Channel:
    """One end.  Making one is collective among the two."""

    def __init__(self, here: Node, there: Node, timeout_seconds: float) -> None:
        """Raises PeerError when the other does not come within the timeout."""
        self.there = there
        self._seconds = timeout_seconds
        low, high = sorted([here.rank, there.rank])
        key = f"nvme_resume/{low}-{high}/{_made[low, high]}"
        _made[low, high] += 1
        with self._named("opening a connection"):
            # Not new_group: it wants every rank of the job to come, or to have made equally many groups.
            self._group: Any = dist.ProcessGroupGloo(
                distributed_c10d.PrefixStore(key, distributed_c10d._get_default_store()),
                int(here.rank == high),
                2,
                timedelta(seconds=timeout_seconds),
            )
        self._other = int(there.rank == high)

    def send(self, message: Any) -> None:
        """Plain data, as JSON.  PeerError."""
        data = bytearray(json.dumps(message).encode())
        length = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
        with self._named("sending"):
            self._group.send([length], self._other, 0).wait()
            self._group.send([torch.frombuffer(data, dtype=torch.uint8)], self._other, 0).wait()

    def receive(self) -> Any:
        """What the other end sent.  PeerError; CorruptError when that is no message."""
        length = torch.zeros(_LENGTH_BYTES, dtype=torch.uint8)
        with self._named("waiting"):
            self._group.recv([length], self._other, 0).wait()
            size = int(length.view(torch.int64).item())
            if not 0 < size <= _LONGEST_MESSAGE:
                raise CorruptError(f"{self.there} sent no message", expected="a length", found=size)
            data = torch.zeros(size, dtype=torch.uint8)
            self._group.recv([data], self._other, 0).wait()
        try:
            return json.loads(data.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{self.there} sent no message: {error}") from None

    def send_block(self, block: torch.Tensor) -> Any:
        """Begin to send bytes (uint8); ``finish`` what is returned before the tensor changes."""
        with self._named("sending"):
            return self._group.send([block], self._other, 1)

    def receive_block(self, block: torch.Tensor) -> Any:
        """Begin to receive exactly that many bytes; ``finish`` what is returned before they are read."""
        with self._named("receiving"):
            return self._group.recv([block], self._other, 1)

    def finish(self, work: Any) -> None:
        """Until a block has gone or come.  PeerError."""
        with self._named("a transfer"):
            work.wait()

    @contextmanager
    def _named(self, during: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"{self.there} does not answer ({during}; waited for at most {self._seconds:.0f} s): {error}",
                rank=self.there.rank,
                hint="look at its log and at the network; what had arrived stays, and the next run goes on",
            ) from error
