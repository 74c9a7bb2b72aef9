"""Where processes are killed: every call that a counting run made, before, half-way and after; or a seeded spread."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.torture.kill import HALVES, READING, Trap


@dataclass(frozen=True)
class Point:
    """One death."""

    scenario: str
    rank: int
    trap: Trap
    operation: str = ""  # as the counting run saw it
    harm: str = ""  # done afterwards, which must be noticed (``evidence.HARM``)

    def plain(self) -> dict[str, Any]:
        """For reports."""
        return {
            "scenario": self.scenario,
            "rank": self.rank,
            **asdict(self.trap),
            "operation": self.operation,
            "harm": self.harm,
        }


def every(
    scenario: str, rank: int, counted: dict[str, Sequence[Sequence[str]]], native_calls: int
) -> Iterable[Point]:
    """All points of one scenario and rank.

    ``after`` a call that only reads is ``before`` the next one, so it is left out.
    """
    for n, (operation, path) in enumerate(counted.get("disk", ()), 1):
        moments = ["before"]
        moments += ["half"] if operation in HALVES else []
        moments += ["after"] if operation not in READING else []
        for when in moments:
            yield Point(scenario, rank, Trap("disk", n, when), f"{operation} {path}")
    for n, (operation, path) in enumerate(counted.get("stock", ()), 1):
        for when in ("before", "half", "after"):
            yield Point(scenario, rank, Trap("stock", n, when), f"{operation} {path}")
    for n in range(1, native_calls + 1):
        yield Point(scenario, rank, Trap("native", n), "native copier")


def spread(points: Sequence[Point], number: int, seed: int) -> list[Point]:
    """``number`` of them: each scenario gets the same share as far as it has so many, each kind of call its part."""
    chance = random.Random(seed)
    queues: dict[tuple[str, int], list[tuple[float, Point]]] = {}
    by_kind: dict[tuple[str, int, str, str], list[Point]] = {}
    for point in points:
        by_kind.setdefault((point.scenario, point.rank, point.trap.kind, point.trap.when), []).append(point)
    for key, group in by_kind.items():
        chance.shuffle(group)
        offset = chance.random() / 2  # which kind comes first is a matter of chance where few are taken
        ranked = [((index + offset) / len(group), point) for index, point in enumerate(group)]
        queues.setdefault(key[:2], []).extend(ranked)
    ordered = [[p for _, p in sorted(q, key=lambda item: item[0])] for q in queues.values()]
    chosen: list[Point] = []
    depth = 0
    while len(chosen) < number and any(depth < len(q) for q in ordered):
        chosen += [q[depth] for q in ordered if depth < len(q)]
        depth += 1
    return chosen[:number]
