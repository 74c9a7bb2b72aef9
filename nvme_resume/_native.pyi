"""The native copier: byte ranges from file to file, hashed on the way. Source: csrc/."""

import builtins
from collections.abc import Sequence
from typing import Literal, final

CHUNK_BYTES: int
"""Digests are taken over pieces of this size (4 MiB), a constant of the checkpoint format."""

class Cancelled(Exception):
    """`Transfer.cancel` was called before `Transfer.run` had finished."""

@final
class Job:
    """One range to copy, or to read and hash when `dst` is None. Immutable.

    length -1 means: to the end of the source. With truncate the destination is created if need be
    and ends where the range ends; without, the range goes into an existing file whose other bytes stay.
    """

    def __init__(
        self,
        src: str,
        dst: str | None = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: int = -1,
        truncate: bool = True,
    ) -> None: ...
    @property
    def src(self) -> str: ...
    @property
    def dst(self) -> str | None: ...
    @property
    def src_offset(self) -> int: ...
    @property
    def dst_offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def truncate(self) -> bool: ...

@final
class FileResult:
    """What became of one job, in the order of the jobs."""

    @property
    def bytes(self) -> int: ...
    @property
    def digest(self) -> str:
        """XXH3-128 of `chunk_digests`, 32 hex characters; empty when hashing was off."""

    @property
    def chunk_digests(self) -> builtins.bytes:
        """XXH3-128 of each chunk, 16 bytes in canonical order; empty when hashing was off."""

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT carried all of it but an unaligned tail."""

    @property
    def engine(self) -> str: ...

@final
class Transfer:
    """A list of jobs carried out as one. Runs once."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        block_bytes: int = 16 << 20,
        in_flight: int = 4,
        engine: Literal["auto", "threads", "libaio"] = "auto",
        direct: Literal["auto", "on", "off"] = "auto",
        sync: bool = True,
        hash: bool = True,
        bandwidth_limit: int = 0,
        low_priority: bool = False,
    ) -> None:
        """low_priority: its threads have the lowest claim on the CPU (nice 19) and the disk (idle class)."""

    def run(self) -> list[FileResult]:
        """Block until all is done; the GIL is released throughout, signals wait.

        Raises OSError with `filename`, `offset` and `operation` ("open", "read", "write", "fsync",
        "fallocate", "truncate", "close", or "setup" when the engine could not start), or Cancelled.
        Destinations created or written to by then stay for the caller to remove. Directories are not
        synced.
        """

    def cancel(self) -> None:
        """Make `run` raise Cancelled soon. From any thread, also before `run`."""

    def set_paused(self, paused: bool) -> None:
        """Hold new requests back, half a second each at most. From any thread."""

    def progress(self) -> tuple[int, int]:
        """Bytes done and bytes in all; the latter is 0 until `run` has looked at the files."""

def digest_of_chunks(chunk_digests: bytes) -> str:
    """The digest of a file from the digests of its chunks."""

def _testing_faults(faults: Sequence[tuple[str, int, int | Literal["short"]]]) -> None:
    """Make the n-th call of an operation fail with an errno or move half ("short"); n = 0: each call.

    Holds for transfers started from now on; an empty list ends it. Counting starts anew.
    """

def _testing_kill_at(nth_call: int) -> None:
    """SIGKILL this process before its n-th storage call from now on; 0 ends it."""
