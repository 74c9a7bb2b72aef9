"""Many saves of one engine with rotation: what the process and the disks hold at some of them.

Run as ``python -m tests.engine.many CASE.json`` (``harness.launch``).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests import training


def holds(*folders: Path) -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [p.lstat() for folder in folders for p in folder.rglob("*") if p.is_file()]
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "disk": sum({s.st_ino: s.st_blocks * 512 for s in files}.values()),
        "names": len(files),
    }


def main(path: str) -> None:
    case: dict[str, Any] = json.loads(Path(path).read_text())
    save_dir, nvme = Path(case["save_dir"]), Path(case["nvme_path"])
    found: list[dict[str, int]] = []
    try:
        engine = training.make_engine(case)
        for save in range(case["count"]):
            training.train(case, engine, 0, save, save + 1)
            engine.save_checkpoint(str(save_dir))
            if (save + 1) % (case["count"] // 10) == 0:
                engine.wait_for_checkpoint()
                found.append(holds(save_dir, nvme))
        Path(case["out"]).write_text(
            json.dumps({"holds": found, "left": sorted(p.name for p in save_dir.iterdir())})
        )
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
