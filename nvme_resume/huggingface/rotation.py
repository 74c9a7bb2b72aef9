"""Which of a Trainer's checkpoints to keep: ``save_total_limit``, by step.

The rules are the Trainer's own (5.24.0, ``trainer_utils.py::rotate_checkpoints``), but for one: the order is that of
the steps, never of modification times, which a copy or a network file system changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for any other name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def by_step(names: Iterable[str]) -> list[str]:
    """The checkpoint folders among ``names``, oldest step first."""
    found = [(step, name) for name in names if (step := step_of(name)) is not None]
    return [name for _, name in sorted(found)]


def outdated(names: Iterable[str], limit: int | None, protected: Iterable[str]) -> list[str]:
    """Those to remove, oldest first, so that ``limit`` are left; never one that is ``protected``.

    ``limit`` None, zero or less: none.  More protected ones than ``limit``: they stay, and nothing else.
    """
    if limit is None or limit <= 0:
        return []
    there = by_step(names)
    safe = set(protected) & set(there)
    going = [name for name in there if name not in safe]
    return going[: max(0, len(there) - max(limit, len(safe)))]
