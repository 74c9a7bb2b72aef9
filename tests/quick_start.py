"""Spare every process of the tests the seconds that DeepSpeed spends asking what CPU this is.

``py-cpuinfo`` measures the clock and runs programs, five times in each process (DeepSpeed 0.19.8,
``op_builder/builder.py::cpu_arch`` and ``simd_width``).  The answer is kept beside the compiled ops, which depend on it
as well.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

from nvme_resume import ops


def remember_cpu() -> None:
    """Let ``cpuinfo.get_cpu_info`` answer from a file, made by the first process that asks."""
    import cpuinfo

    measure = cpuinfo.get_cpu_info
    path = ops.extensions_root() / f"cpuinfo-{os.uname().nodename}.json"

    @cache
    def get_cpu_info() -> dict[str, Any]:
        if path.is_file():
            known: dict[str, Any] = json.loads(path.read_text())
            return known
        found: dict[str, Any] = measure()
        mine = path.with_suffix(f".{os.getpid()}")
        mine.write_text(json.dumps(found))
        mine.rename(path)
        return found

    cpuinfo.get_cpu_info = get_cpu_info
