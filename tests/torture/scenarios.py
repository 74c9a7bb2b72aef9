"""What the process does that will be killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.harness import DEFAULTS

OLD, OLDER, NEW, AFTER = "t2", "t1", "t3", "after"
TIMEOUT_SECONDS = 8.0

# Two swapped sub-groups, the smallest that DeepSpeed swaps, and one that stays in memory.
WIDTHS = {1: 512, 2: 768}
_CASE = {**DEFAULTS, "layers": 2, "sub_group_size": 200_000}


@dataclass(frozen=True)
class Scenario:
    """One way to save, load or prune.  A base of two checkpoints, t1 and t2, is there; t2 is loaded first."""

    name: str
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    tag: str | None = NEW  # saved; None: nothing is
    trained: int = 0  # steps after save_checkpoint has returned
    exchanges: bool = True  # can the file system swap two names?
    sealed: bool = True  # has the base its hashes?
    armed_at: str = "save"  # or "start": before the engine is wrapped

    def case(self, nvme: str, *, seed: int) -> dict[str, Any]:
        """The training program's settings."""
        options = {"timeout_seconds": TIMEOUT_SECONDS, **self.options}
        return {**_CASE, "nvme_path": nvme, "seed": seed, "nvme_checkpoint": options}

    @property
    def width(self) -> int:
        """Width of the model: a rank's part of a layer must be large enough to be swapped."""
        return WIDTHS[self.ranks]

    @property
    def base(self) -> str:
        """Scenarios of one base share its folders."""
        return f"{self.ranks}-{'sealed' if self.sealed else 'unsealed'}"


_DIRECT = {"method": "direct"}
_ASYNC = {"method": "direct", "async": True}

ALL = (
    Scenario("save, links", trained=1),
    Scenario("save, copies", options=_DIRECT),
    Scenario("save, server copies", options={"method": "server"}),
    Scenario("save, copies behind training", options=_ASYNC, trained=2),
    Scenario("save, sealed before the commit", options={"seal": "before_commit"}),
    Scenario("same tag again", tag=OLD, trained=1),
    Scenario("same tag again, no exchange", tag=OLD, exchanges=False),
    Scenario("same tag again, copies behind training, no exchange", options=_ASYNC, tag=OLD, exchanges=False),
    Scenario("save and prune", options={"keep_last": 1}),
    Scenario("save and prune, copies behind training", options={**_ASYNC, "keep_last": 2}, trained=1),
    Scenario("load, links", tag=None, armed_at="start", trained=1),
    Scenario("load, copies", options=_DIRECT, tag=None, armed_at="start", trained=1),
    Scenario("load, every byte checked first", options={"verify": "full"}, tag=None, armed_at="start"),
    Scenario("load, hashes added behind", tag=None, armed_at="start", sealed=False, trained=1),
    Scenario("two ranks, links", ranks=2, trained=1),
    Scenario("two ranks, copies behind training", ranks=2, options=_ASYNC, trained=1),
    Scenario("two ranks, same tag again", ranks=2, tag=OLD),
    Scenario("two ranks, load", ranks=2, tag=None, armed_at="start", trained=1),
)
BY_NAME = {s.name: s for s in ALL}
