"""Real saves of a small engine, recorded.  Run as ``python -m tests.crash.saving CASE.json LOG`` (``harness.launch``).

The case is one of ``tests.training``'s; swap folder and save folder lie below ``root``.  ``saves`` are tags, one
training step before each.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any


def main(path: str, log: str) -> None:
    import torch

    from tests import training
    from tests.crash.promise import SAVES
    from tests.crash.recording import RecordingDisk, recorded

    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(path).read_text())
    root = Path(case["root"])
    engine = training.make_engine(case)
    disk = RecordingDisk(root)
    with recorded(disk):
        for step, tag in enumerate(case["saves"]):
            training.train(case, engine, 0, step, step + 1)
            engine.save_checkpoint(str(root / SAVES), tag=tag)
        engine.wait_for_checkpoint()
    Path(log).write_bytes(pickle.dumps(disk.log))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)
