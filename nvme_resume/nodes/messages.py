"""What two nodes say to each other.  Plain data, checked when it arrives: the other end may run another version."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from nvme_resume import errors
from nvme_resume.errors import NvmeResumeError
from nvme_resume.manifest import FileSeal


class Told(BaseModel):
    """An error of the other end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    text: str
    facts: dict[str, str | int | None]

    @classmethod
    def of(cls, error: NvmeResumeError) -> Told:
        """What to send."""
        return cls(kind=type(error).__name__, text=error.message, facts=error.facts())

    def error(self, said: str) -> NvmeResumeError:
        """What to raise here; ``said``: the other end in words."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, NvmeResumeError)):
            kind = NvmeResumeError
        known = NvmeResumeError("").facts()
        facts: dict[str, Any] = {key: value for key, value in self.facts.items() if key in known}
        return kind(f"{said}: {self.text}", **facts)


class Message(BaseModel):
    """Any message; with ``error`` the talk about this checkpoint ends."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error: Told | None = None


M = TypeVar("M", bound=Message)


class Turn(Message):
    """The sender: which checkpoint comes next.  ``number`` None: none."""

    number: int | None
    tag: str = ""
    beside: str | None = None  # the save folder, where it is a sibling of the one that the number stands for


class Hello(Message):
    """The receiver: go on, or not."""

    skip: bool = False
    loose: list[str] | None = None  # files beside the tag folder that are here; None: none are wanted


class Offer(Message):
    """The sender: what there is.  Records as they are encoded on disk; ``ranks``: record, seal, extras by rank."""

    head: str = ""
    ranks: dict[int, tuple[str | None, str | None, str | None]] = {}
    loose: dict[str, FileSeal] = {}


class Ask(Message):
    """The receiver: that range of that file, or nothing more."""

    done: bool = False
    file: str = ""
    offset: Annotated[int, Field(ge=0)] = 0
    length: Annotated[int, Field(ge=0)] = 0


class Sent(Message):
    """The sender: all blocks of the range have gone."""
