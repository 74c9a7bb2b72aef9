"""One thing that was looked at."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["good", "note", "bad"]


class Finding(NamedTuple):
    """``note``: worth knowing, nothing to repair.  ``bad``: will fail or hang; ``hint`` says what to do."""

    what: str
    value: str
    state: State = "good"
    hint: str | None = None
