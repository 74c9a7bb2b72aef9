"""Training beside a background copy: steps with and without one, in turns.

``python -m benchmarks.drain GIGABYTES ROUNDS LIMIT_MIB FOLDER`` (limit 0: none); JSON on the last line.  The copy goes
to the same disk (``"method": "direct"``), the harder case: reads, writes and the training share it.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import engine as bench


def measure(gigabytes: float, rounds: int, limit: float, folder: Path) -> dict[str, Any]:
    """Seconds of equally many steps without and with a copy, and of the stall, one entry a round."""
    options = {"method": "direct", "async": True, "bandwidth_limit_mib": limit}
    engine = bench.build(gigabytes, folder / "nvme", options)
    for _ in range(2):
        bench.step(engine)
    found: dict[str, Any] = {"without": [], "with": [], "stall": [], "copy": [], "steps": []}
    for index in range(rounds):
        save_dir = folder / f"ck{index}"
        start = time.perf_counter()
        engine.save_checkpoint(str(save_dir), tag="t")
        found["stall"].append(time.perf_counter() - start)
        steps = []
        while not (save_dir / "latest").exists():  # until it is committed
            steps.append(bench.step(engine))
        found["copy"].append(time.perf_counter() - start)
        found["with"].append(sum(steps))
        found["steps"].append(len(steps))
        engine.wait_for_checkpoint()
        shutil.rmtree(save_dir)
        found["without"].append(sum(bench.step(engine) for _ in steps))
    return found


if __name__ == "__main__":
    size, count, most, where = sys.argv[1:]
    print(json.dumps(measure(float(size), int(count), float(most), Path(where))), flush=True)
