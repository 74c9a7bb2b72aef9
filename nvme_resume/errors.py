"""The one exception tree of the package.

Every error says what was expected, what was found and which command or change comes next; it carries the
facts (rank, tag, path, offset) as attributes, survives pickling (ranks send each other their errors) and
knows the exit code of the command line.  Nothing here does I/O.
"""

from __future__ import annotations

import errno
from typing import Any


class NvmeResumeError(Exception):
    """Base of all errors raised by nvme_resume.

    Attributes: ``message`` (the sentence), ``rank`` (global rank where it happened or None), ``tag``,
    ``path``, ``offset`` (bytes), ``expected``, ``found``, ``hint`` (what to do next).
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        tag: str | None = None,
        path: str | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.rank = rank
        self.tag = tag
        self.path = None if path is None else str(path)
        self.offset = offset
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (
                ("rank", self.rank),
                ("tag", self.tag),
                ("file", self.path),
                ("offset", self.offset),
            )
            if value is not None
        ]
        text = (f"[{', '.join(where)}] " if where else "") + self.message
        if self.expected is not None or self.found is not None:
            text += f" (expected {self.expected}, found {self.found})"
        if self.hint:
            text += f". Next: {self.hint}"
        return text

    def facts(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this error (used for pickling and between ranks)."""
        return {
            "rank": self.rank,
            "tag": self.tag,
            "path": self.path,
            "offset": self.offset,
            "expected": self.expected,
            "found": self.found,
            "hint": self.hint,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts())


def _rebuild(kind: type[NvmeResumeError], message: str, facts: dict[str, Any]) -> NvmeResumeError:
    return kind(message, **facts)


class ConfigError(NvmeResumeError):
    """The ``nvme_checkpoint`` section or the DeepSpeed configuration cannot work as written."""

    exit_code = 2


class UnsupportedError(NvmeResumeError):
    """This engine, DeepSpeed version or feature is one that exact resume is not known for."""


class StorageError(NvmeResumeError):
    """A disk refused an operation; nothing was published, older checkpoints and ``latest`` are untouched."""


class PeerError(NvmeResumeError):
    """A rank did not arrive within the timeout, or ranks disagree on what they were asked to do."""


class NoCheckpointError(NvmeResumeError):
    """There is no checkpoint where one was named."""

    exit_code = 10


class ReplacedError(NoCheckpointError):
    """The tag was saved again while it was being copied elsewhere; the newer checkpoint takes its place."""


class LockedError(NvmeResumeError):
    """Another job owns the swap folder or the checkpoint folder."""

    exit_code = 11


class CorruptError(NvmeResumeError):
    """A file or record of the checkpoint is not what was saved."""

    exit_code = 12


class IncompatibleError(NvmeResumeError):
    """The checkpoint is sound but does not fit this engine."""

    exit_code = 13


class NoSpaceError(StorageError):
    """The checkpoint does not fit on its filesystem; found out before anything was written."""

    exit_code = 14


def from_os_error(error: OSError, during: str, *, live: bool = False) -> NvmeResumeError:
    """The exception of this tree that says the same as an OSError (the copier's carry offset and operation).

    ``live``: what was read is no checkpoint yet, so that a file that cannot be read is the disk's fault.
    """
    path = error.filename if isinstance(error.filename, str) else None
    offset = getattr(error, "offset", None)
    operation = getattr(error, "operation", None)
    message = f"{during}: {operation or 'input/output'} failed: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoSpaceError(message, path=path, offset=offset, hint="free some space, then try again")
    if (
        not live
        and operation in ("read", "open")
        and error.errno in (errno.ENOENT, errno.EIO, errno.ENODATA, errno.ELOOP)
    ):
        return CorruptError(message, path=path, offset=offset, hint="load an older tag by its name")
    return StorageError(message, path=path, offset=offset, hint="look at the disk, then try again")


def of(error: Exception, during: str) -> NvmeResumeError:
    """The exception of this tree that stands for any other; the other is its cause."""
    if isinstance(error, NvmeResumeError):
        return error
    if isinstance(error, OSError):
        found = from_os_error(error, during)
    else:
        found = NvmeResumeError(f"{during}: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
