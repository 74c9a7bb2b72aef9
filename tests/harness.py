"""Run ``tests.training`` in fresh processes, one a rank, and compare runs bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import zygote

ROOT = Path(__file__).resolve().parent.parent

DEFAULTS: dict[str, Any] = {
    "mode": "ours",
    "seed": 1,
    "dtype": "bf16",
    "dropout": 0.1,
    "accumulation": 1,
    "clipping": 0.0,
    "offload_optimizer": "nvme",
    "offload_param": "none",
    "pipelined": False,
    "optimizer": "AdamW",
    "two_groups": True,
    "lora": False,
    "zero_init": False,
    "persistence": 100_000,
    "sub_group_size": 500_000,
    "block_size": 1 << 20,
    "intra_op_parallelism": 1,
    "layers": 3,
    "optimizer_from_code": False,
    "nvme_checkpoint": True,  # a list: those of each rank
    "load": None,
    "saves": [],
    "until": 0,
    "corrupt_rng_after_load": False,
    "skip_final_digest": False,
    "skip_loaded_digest": False,
    "buffers": 0,
    "failing_loads": [],
    "reload": None,
    "train_before_load": False,
    "save_after_backward": None,
    "list_bare_handles": False,
    "node_local": False,  # DeepSpeed's use_node_local_storage
    "nodes": False,  # the node of each rank (a list), or True: each is one by itself
    "private": None,  # a folder: each node works in one of its own below, where relative paths lead
    "end": "wait",  # for the hashes; "abrupt": as if killed; "exit": by way of the interpreter
}


@dataclass
class Run:
    """What the ranks of one run reported."""

    ranks: list[dict[str, Any]]
    codes: list[int]
    log: str

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [r["error"] for r in self.ranks if "error" in r]


_ports = itertools.count(os.getpid() * 37)  # parallel test processes begin at other ones


def free_port() -> int:
    """A port that nobody listens on.

    Below those that the kernel gives to connections (32768 and up): one of these may be taken before rank 0 listens.
    """
    while True:
        port = 20_000 + next(_ports) % 12_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def launch(
    tmp: Path,
    name: str,
    ranks: int,
    module: str,
    *arguments: str,
    python: str = sys.executable,
    nodes: bool | list[int] = False,
    environments: Sequence[dict[str, str]] | None = None,
    meanwhile: Callable[[list[Any]], None] | None = None,
) -> tuple[list[int], str]:
    """Run ``python -m module arguments`` in ``ranks`` fresh processes: exit codes, and the ends of their logs.

    ``nodes``: which node each says it is on, or True: each on one of its own.  ``environments``: what each has in
    addition.  ``meanwhile`` is called with the processes once they run.
    """
    port = free_port()
    logs = [tmp / f"log-{name}.{rank}.txt" for rank in range(ranks)]
    processes: list[zygote.Child | subprocess.Popen[bytes]] = []
    for rank, log in enumerate(logs):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank(nodes, rank)),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore::FutureWarning",
            **(environments[rank] if environments else {}),
        }
        if python == sys.executable:
            processes.append(zygote.start(module, list(arguments), environment, ROOT, log))
            continue
        with log.open("wb") as stream:
            command = [python, "-m", module, *arguments]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
            )
    try:
        if meanwhile is not None:
            meanwhile(processes)
        codes = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return codes, "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)


def local_rank(nodes: bool | list[int], rank: int) -> int:
    """Among those on the same node."""
    if isinstance(nodes, list):
        return nodes[:rank].count(nodes[rank])
    return 0 if nodes else rank


def run(
    tmp: Path,
    name: str,
    ranks: int = 1,
    *,
    check: bool = True,
    environments: Sequence[dict[str, str]] | None = None,
    meanwhile: Callable[[list[Any]], None] | None = None,
    **case: Any,
) -> Run:
    """One run of the training program in ``ranks`` fresh processes."""
    unknown = case.keys() - DEFAULTS.keys() - {"nvme_path"}
    assert not unknown, unknown
    full = {**DEFAULTS, "nvme_path": str(tmp / f"nvme-{name}"), "out": str(tmp / f"out-{name}"), **case}
    if full["nodes"] is True:
        full["nodes"] = list(range(ranks))
    path = tmp / f"case-{name}.json"
    path.write_text(json.dumps(full))
    codes, logs = launch(
        tmp, name, ranks, "tests.training", str(path),
        nodes=full["nodes"], environments=environments, meanwhile=meanwhile,
    )  # fmt: skip
    reports = []
    for rank in range(ranks):
        out = tmp / f"out-{name}.{rank}.json"
        reports.append(
            json.loads(out.read_text()) if out.is_file() else {"error": {"type": "died", "text": logs}}
        )
    if check:
        assert codes == [0] * ranks, f"{name}: exit codes {codes}\n{logs}"
    return Run(reports, codes, logs)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Places where two digest trees differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for key in sorted(one.keys() | other.keys()):
            found += differences(one.get(key, "missing"), other.get(key, "missing"), f"{path}/{key}")
        return found
    return [] if one == other else [f"{path}: {one} != {other}"]


def assert_equal_resume(
    tmp: Path,
    ranks: int = 1,
    *,
    save_at: int = 5,
    steps: int = 10,
    first: str = "ours",
    checkpoint: str | None = None,
    **case: Any,
) -> None:
    """Uninterrupted run, then stop and resume in fresh processes with another model seed: all bits equal.

    ``first``: who saves (``"stock"``: plain DeepSpeed).  Numbers count micro batches.
    """
    checkpoint = checkpoint or str(tmp / "ck")
    with ThreadPoolExecutor() as pool:
        future = pool.submit(
            run,
            tmp,
            "whole",
            ranks,
            **{**case, "mode": "stock"},
            until=steps,
            saves=[{"at": save_at, "dir": None, "digest": True}],
        )
        run(
            tmp,
            "first",
            ranks,
            **{**case, "mode": first},
            until=save_at,
            saves=[{"at": save_at, "dir": checkpoint}],
        )
        whole = future.result()
    resumed = run(tmp, "resumed", ranks, **case, seed=77, until=steps, load=checkpoint)
    for rank in range(ranks):
        expected, found = whole.ranks[rank], resumed.ranks[rank]
        assert found["start"] == save_at
        saved, loaded = expected["saved"][0], found["loaded"]
        if (
            first == "stock"
        ):  # never saved by plain DeepSpeed; micro_steps counts from the last window's start
            for tree in (saved, loaded):
                del tree["rng"], tree["step"]["engine.micro_steps"]
        assert differences(saved, loaded) == [], f"rank {rank}: state after loading"
        assert found["losses"] == expected["losses"][save_at:], f"rank {rank}: losses"
        if first == "ours":
            assert differences(expected["final"], found["final"]) == [], f"rank {rank}: final state"
