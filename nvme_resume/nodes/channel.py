"""Two ranks and a gloo group of their own: messages, and blocks of bytes.

Used from a background thread, so it keeps to what is safe there: point-to-point operations of the group object itself,
which ``destroy_process_group`` at the end of a program does not take away.  A group that has failed once stays broken:
make another.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed import distributed_c10d

from nvme_resume.errors import PeerError
from nvme_resume.nodes.messages import M, Message
from nvme_resume.peers import Peers

_LONGEST_MESSAGE = 1 << 30  # bytes
_LENGTH_BYTES = 8


class Node(NamedTuple):
    """One place where ranks save, by the rank that publishes there."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


Pair = tuple[int, int]  # ranks: who sends files, who takes them in


class Meeting(NamedTuple):
    """Who is there, and a name that no meeting before had: channels that are made now are told from earlier ones by it.

    A count on both ends would not do: after an error one of them may have made fewer.
    """

    name: str
    nodes: list[Node]  # by rank

    @classmethod
    def call(cls, peers: Peers) -> Meeting:
        """Collective."""
        found = peers.run(lambda: (uuid.uuid4().hex, peers.host), "look for the other nodes")
        return cls(found[0][0], [Node(rank, host) for rank, (_, host) in enumerate(found)])


class Channel:
    """One end.  Making one is collective among the two."""

    def __init__(self, meeting: Meeting, pair: Pair, rank: int, timeout_seconds: float) -> None:
        """The end of ``rank``, which is one of ``pair``; one channel a pair and meeting, and each way is another pair.

        Raises PeerError when the other does not come within the timeout.
        """
        other = 1 - pair.index(rank)
        self.there = meeting.nodes[pair[other]]
        self._seconds = timeout_seconds
        key = f"nvme_resume/{meeting.name}/{pair[0]}-{pair[1]}"
        with self._named("opening a connection"):
            # Not new_group: it wants every rank of the job to come, or to have made equally many groups.
            self._group: Any = dist.ProcessGroupGloo(
                distributed_c10d.PrefixStore(key, distributed_c10d._get_default_store()),
                1 - other,
                2,
                timedelta(seconds=timeout_seconds),
            )
        self._other = other

    def send(self, message: Message) -> None:
        """As JSON.  PeerError."""
        data = bytearray(message.model_dump_json(exclude_defaults=True).encode())
        length = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
        with self._named("sending"):
            self._group.send([length], self._other, 0).wait()
            self._group.send([torch.frombuffer(data, dtype=torch.uint8)], self._other, 0).wait()

    def receive(self, kind: type[M]) -> M:
        """What the other end sent.  PeerError, also when that is no such message: nobody knows then what comes next."""
        length = torch.zeros(_LENGTH_BYTES, dtype=torch.uint8)
        with self._named("waiting"):
            self._group.recv([length], self._other, 0).wait()
            size = int(length.view(torch.int64).item())
            if not 0 < size <= _LONGEST_MESSAGE:
                raise self._misunderstood(f"{size} bytes")
            data = torch.zeros(size, dtype=torch.uint8)
            self._group.recv([data], self._other, 0).wait()
        try:
            return kind.model_validate_json(data.numpy().tobytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise self._misunderstood(f"{where}: {first['msg']}" if where else first["msg"]) from None

    def _misunderstood(self, found: str) -> PeerError:
        return PeerError(
            f"{self.there} says something that is not understood",
            rank=self.there.rank,
            expected="what this version of nvme_resume says",
            found=found[:200],
            hint="run the same version of nvme_resume on all nodes",
        )

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
