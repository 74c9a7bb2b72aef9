"""The order a driver gives to the processes of one phase, and the lines they answer with."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEC = "spec.json"

# Events of a worker, one JSON object a line.
READY, STEP, DIGESTS, DONE = "ready", "step", "digests", "done"
AT_SAVE, AT_END = "at_save", "at_end"


@dataclass(frozen=True)
class Spec:
    """One phase of one run: what every rank of it does."""

    folder: str  # of this phase: logs and events go there
    factory: str
    config: dict[str, Any]
    seed: int
    last_step: int
    extension: bool = False  # save and load through nvme_resume
    load: str | None = None  # checkpoint folder to resume from
    save: str | None = None  # checkpoint folder to save into, after the last step
    digests_after: tuple[int, ...] = ()  # steps whose end is worth a look at the whole state
    digests_loaded: bool = False  # the same right after loading

    def write(self) -> Path:
        """Store the order where the workers read it."""
        path = Path(self.folder) / SPEC
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        return path

    @staticmethod
    def read(path: Path) -> Spec:
        """The order of this worker's phase."""
        content = json.loads(path.read_text())
        return Spec(**{**content, "digests_after": tuple(content["digests_after"])})

    def log(self, rank: int) -> Path:
        """Everything a rank printed."""
        return Path(self.folder) / f"rank{rank}.log"

    def events(self, rank: int) -> Path:
        """What a rank measured."""
        return Path(self.folder) / f"rank{rank}.jsonl"
