"""Save stall, first step after a save, bytes written, load call, peak memory of a load: ours beside stock.

``python -m benchmarks.save_and_load GIGABYTES ROUNDS FOLDER``: one engine, stock and ours take turns; JSON on the last
line.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from benchmarks import engine as bench
from benchmarks import system


def timed(call: Any, *args: Any, **kwargs: Any) -> float:
    start = time.perf_counter()
    call(*args, **kwargs)
    return time.perf_counter() - start


def measure(gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """All figures of one size, a list for each: one entry a round."""
    engine = bench.build(gigabytes, folder / "nvme")
    for _ in range(2):
        bench.step(engine)
    names = ("step", "stock_save", "stock_fsync", "step_after_stock", "our_save", "step_after_ours")
    names += (
        "our_written",
        "our_device",
        "stock_written",
        "stock_load",
        "our_load",
        "our_load_peak",
        "our_read",
    )
    found: dict[str, Any] = {name: [] for name in names}
    for index in range(rounds):
        found["step"].append(bench.step(engine))

        stock = folder / f"stock{index}"
        before = system.written_by_process()
        found["stock_save"].append(timed(DeepSpeedEngine.save_checkpoint, engine, str(stock), tag="t"))
        found["stock_fsync"].append(timed(system.fsync_tree, stock))
        found["stock_written"].append(system.written_by_process() - before)
        found["step_after_stock"].append(bench.step(engine))
        found["step"].append(bench.step(engine))

        ours = folder / f"ours{index}"
        before, device = system.written_by_process(), system.written_to_device(folder)
        found["our_save"].append(timed(engine.save_checkpoint, str(ours), tag="t"))
        found["our_written"].append(system.written_by_process() - before)
        if device is not None:
            found["our_device"].append(system.written_to_device(folder) - device)
        found["step_after_ours"].append(bench.step(engine))
        engine.wait_for_checkpoint()

        # Right after a step all content is under the public names, where DeepSpeed's own loader puts it.
        found["cold"] = system.drop_caches()
        found["stock_load"].append(timed(DeepSpeedEngine.load_checkpoint, engine, str(stock), tag="t"))
        system.drop_caches()
        resident, read = system.reset_peak(), read_by_process()
        found["our_load"].append(timed(engine.load_checkpoint, str(ours), tag="t"))
        found["our_read"].append(read_by_process() - read)
        found["our_load_peak"].append(system.memory("VmHWM") - resident)
        bench.step(engine)
        engine.wait_for_checkpoint()
        shutil.rmtree(stock)
        shutil.rmtree(ours)
    swap = Path(engine.optimizer.optimizer_swapper.swap_folder)
    files = [p.stat().st_size for p in swap.iterdir() if "gradient" not in p.name]
    found |= {"state_bytes": sum(files), "state_files": len(files)}
    return found


def read_by_process() -> int:
    """Bytes this process has read from storage."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


if __name__ == "__main__":
    size, count, where = sys.argv[1:]
    print(json.dumps(measure(float(size), int(count), Path(where))), flush=True)
