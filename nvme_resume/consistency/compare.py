"""What differs between two runs: losses bit by bit, state by kind and place.  Pure: no I/O, no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvme_resume.consistency.spec import AT_END, AT_SAVE

ABSENT = "absent"
NAMES = {
    "master": "master weights (fp32)",
    "param16": "weights of the model (16-bit)",
    "buffer": "buffers of the model",
    "step": "step counters",
    "lr": "learning rate",
    "hyper": "hyperparameters of the groups",
    "loss_scaler": "loss scaler",
    "rng": "random state",
    "data": "data order",
}

Digests = Mapping[str, Mapping[str, str]]


@dataclass
class Run:
    """What one run measured.  Lists are by rank; losses of a step are [rank][micro batch]."""

    name: str
    losses: dict[int, list[list[float]]] = field(default_factory=dict)
    lr: dict[int, list[list[float]]] = field(default_factory=dict)
    data: dict[int, list[str]] = field(default_factory=dict)
    digests: dict[str, list[dict[str, dict[str, str]]]] = field(default_factory=dict)  # by moment
    seconds: dict[str, float] = field(default_factory=dict)  # by phase

    def loss(self, step: int) -> float:
        """The loss of one step for people: the mean over ranks and micro batches."""
        values = [value for rank in self.losses[step] for value in rank]
        return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Difference:
    """Places of one kind of state that differ on one or more ranks."""

    moment: str
    kind: str
    differing: int
    total: int
    rank: int  # of the first place
    place: str
    expected: str
    found: str

    @property
    def title(self) -> str:
        """The kind in words."""
        return NAMES.get(self.kind, f"optimizer state {self.kind}")


@dataclass(frozen=True)
class Verdict:
    """How a run compares with the uninterrupted one."""

    run: str
    save_at: int
    steps: int
    differing_steps: tuple[int, ...]  # any loss of the step
    ulp: dict[int, int | None]  # by step: the largest distance of any loss; None where there is no number
    largest: float  # absolute difference of losses; nan where one is no number
    differing_data: tuple[int, ...]
    differences: tuple[Difference, ...]
    compared: int  # losses and digests

    @property
    def equal(self) -> bool:
        """True when every loss, batch and digest is the same to the last bit."""
        return not (self.differing_steps or self.differing_data or self.differences)

    def within(self, tolerance: float | None) -> bool:
        """Equality, or only losses no further apart than ``tolerance`` when one is given."""
        return self.equal if tolerance is None else self.largest <= tolerance

    def at(self, moment: str) -> list[Difference]:
        """The differences of one moment."""
        return [d for d in self.differences if d.moment == moment]

    def explanation(self) -> list[str]:
        """Where to look, in words."""
        if self.equal:
            return []
        lines = []
        early = [s for s in self.differing_steps if s <= self.save_at]
        if early:
            lines.append(
                f"losses differ at step {early[0]} already, before the save: this training does not repeat "
                "itself, so no resume can be judged by it (look for operations that are not deterministic, "
                "data that depends on the seed or on time)"
            )
        if self.differing_data:
            lines.append(f"data order: the batches of step {self.differing_data[0]} are not the same")
        loaded = self.at(AT_SAVE)
        if loaded:
            lines.append(f"not restored: {', '.join(d.title for d in loaded)}")
        elif self.differing_steps or self.at(AT_END):
            lines.append(
                "all that has a digest was restored, yet the runs part: look at state without one, as the "
                "beta^t that DeepSpeedCPUAdam keeps in C++, at what your own code keeps between steps, or at "
                "swapped gradients whose place in their sub-group is no multiple of 512 bytes (DeepSpeed 0.19.8 "
                "reads nothing into such a place, says nothing, and trains on what the buffer held before)"
            )
        return lines


def ulp_distance(a: float, b: float) -> int | None:
    """Number of float32 values from ``a`` to ``b``, signed; None when they differ and one is not a number."""
    if _bits(a) == _bits(b):
        return 0
    if math.isnan(a) or math.isnan(b):
        return None
    return _ordinal(b) - _ordinal(a)


def _bits(value: float) -> bytes:
    return struct.pack("<f", value)


def _ordinal(value: float) -> int:
    """float32 values in order: the neighbour of a value is one more or less; -0.0 is one below 0.0."""
    (word,) = struct.unpack("<i", _bits(value))
    return int(word) if word >= 0 else -(word & 0x7FFFFFFF) - 1


def compare(reference: Run, run: Run, *, save_at: int, steps: int) -> Verdict:
    """Judge ``run`` by ``reference``.  Anything missing counts as different."""
    differing, ulp, data = [], {}, []
    largest, compared = 0.0, 0
    for step in range(1, steps + 1):
        expected = _flat(reference.losses.get(step, []))
        found = _flat(run.losses.get(step, []))
        compared += len(expected)
        distances = [ulp_distance(e, f) for e, f in zip(expected, found, strict=False)]
        complete = bool(expected) and len(expected) == len(found)
        ulp[step] = None if None in distances or not complete else _furthest(distances)
        if ulp[step] != 0:
            differing.append(step)
            gaps = [abs(e - f) for e, f, d in zip(expected, found, distances, strict=False) if d != 0]
            largest = math.nan if not complete or any(map(math.isnan, gaps)) else max([largest, *gaps])
        if reference.data.get(step) != run.data.get(step):
            data.append(step)
    differences: list[Difference] = []
    for moment in (AT_SAVE, AT_END):
        expected_digests = reference.digests.get(moment, [])
        compared += sum(len(places) for rank in expected_digests for places in rank.values())
        differences += compare_digests(moment, expected_digests, run.digests.get(moment, []))
    return Verdict(
        run=run.name,
        save_at=save_at,
        steps=steps,
        differing_steps=tuple(differing),
        ulp=ulp,
        largest=largest,
        differing_data=tuple(data),
        differences=tuple(differences),
        compared=compared,
    )


def compare_digests(moment: str, expected: Sequence[Digests], found: Sequence[Digests]) -> list[Difference]:
    """One entry for each kind that differs anywhere, naming its first differing place."""
    kinds: dict[str, None] = {}
    for rank in [*expected, *found]:
        kinds.update(dict.fromkeys(rank))
    differences = []
    for kind in sorted(kinds, key=_order):
        wrong: list[tuple[int, str, str, str]] = []
        total = 0
        for number in range(max(len(expected), len(found))):
            want = _places(expected, number, kind)
            have = _places(found, number, kind)
            for place in {**want, **have}:
                total += 1
                pair = want.get(place, ABSENT), have.get(place, ABSENT)
                if pair[0] != pair[1]:
                    wrong.append((number, place, *pair))
        if wrong:
            differences.append(Difference(moment, kind, len(wrong), total, *wrong[0]))
    return differences


def _places(digests: Sequence[Digests], rank: int, kind: str) -> Mapping[str, str]:
    return digests[rank].get(kind, {}) if rank < len(digests) else {}


def _order(kind: str) -> tuple[int, str]:
    """Weights first, then the optimizer's state, then the rest as listed above."""
    names = list(NAMES)
    if kind in names:
        return (0 if kind in ("master", "param16", "buffer") else 2, f"{names.index(kind):02d}")
    return (1, kind)


def _flat(losses: Sequence[Sequence[float]]) -> list[float]:
    return [value for rank in losses for value in rank]


def _furthest(distances: Sequence[Any]) -> int:
    return int(max(distances, key=abs, default=0))
