"""Start the ranks of one phase as fresh processes, watch them, end all of them when one is in trouble."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvme_resume import ops
from nvme_resume.consistency import spec as orders
from nvme_resume.consistency.spec import Spec
from nvme_resume.errors import NvmeResumeError, PeerError

POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0  # ranks fail in a row; whoever fails within this time of the first is shown too
TAIL_LINES = 25


class WorkerError(NvmeResumeError):
    """A process of the check ended before its work was done; the message ends with the tail of its log."""


@dataclass
class Rank:
    """One process and what it has told so far."""

    rank: int
    process: subprocess.Popen[bytes]
    events_file: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    _read: int = 0

    def listen(self) -> None:
        """Take in whole lines that are new."""
        if not self.events_file.exists():
            return
        with self.events_file.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        if new:
            self._read += len(new)
            self.events += [json.loads(line) for line in new.splitlines()]
            self.heard = time.monotonic()

    @property
    def progress(self) -> int:
        """How far this rank got."""
        return len(self.events)


def accelerator_count() -> int:
    """Accelerators that a rank of its own can have; 0 on a machine with CPUs only."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen == "cpu":
        return 0
    import torch

    for module in (torch.cuda, getattr(torch, "xpu", None)):
        if module is not None and module.is_available():
            return int(module.device_count())
    return 0 if chosen is None else 1


def default_ranks() -> int:
    """Two ranks where there is room for two, else one."""
    places = accelerator_count() or len(os.sched_getaffinity(0))
    return 2 if places >= 2 else 1


def environment() -> dict[str, str]:
    """Environment of the workers, apart from what differs by rank."""
    env = dict(os.environ)
    if "DS_ACCELERATOR" not in env and accelerator_count() == 0:
        env["DS_ACCELERATOR"] = "cpu"
    # A sum depends on how many threads share it: the same number in all runs, and no fight for the cores.
    env["OMP_NUM_THREADS"] = "1"
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # hundreds, from DeepSpeed; they hide the rest
    return env


def run(
    order: Spec, ranks: int, timeout: float, on_step: Callable[[int], None] = lambda step: None
) -> list[list[dict[str, Any]]]:
    """Run one phase; the events of every rank.

    Raises WorkerError when a process ends early, PeerError when no rank makes progress for ``timeout``
    seconds.  No process outlives this call.
    """
    path = order.write()
    env = environment() | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    started: list[Rank] = []
    try:
        for rank in range(ranks):
            with order.log(rank).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "nvme_resume.consistency.worker", str(path)],
                    env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a compiler it starts is ended with it
                )
            started.append(Rank(rank, process, order.events(rank)))
        _watch(order, started, timeout, on_step)
    finally:
        for worker in started:
            _end(worker.process)
    return [worker.events for worker in started]


def _watch(order: Spec, workers: list[Rank], timeout: float, on_step: Callable[[int], None]) -> None:
    shown = 0
    while True:
        codes = [worker.process.poll() for worker in workers]
        for worker in workers:
            worker.listen()
        if any(code is not None for code in codes):
            time.sleep(GRACE_SECONDS)
            raise _died(order, workers)
        steps = [sum(event["event"] == orders.STEP for event in worker.events) for worker in workers]
        while shown < min(steps):
            shown += 1
            on_step(shown)
        if all(worker.events[-1:] == [{"event": orders.DONE}] for worker in workers):
            return  # they wait to be ended
        if time.monotonic() - max(worker.heard for worker in workers) > timeout:
            raise _silent(order, workers, timeout)
        time.sleep(POLL_SECONDS)


def _died(order: Spec, workers: list[Rank]) -> WorkerError:
    dead = [w for w in workers if w.process.poll() is not None]
    tails = "".join(f"\n--- last lines of {order.log(w.rank)}\n{_tail(order.log(w.rank))}" for w in dead)
    return WorkerError(
        f"rank {' and rank '.join(str(w.rank) for w in dead)} died during {Path(order.folder).name}: "
        f"{', '.join(_how(w.process.returncode) for w in dead)}{tails}",
        rank=dead[0].rank,
        path=str(order.log(dead[0].rank)),
    )


def _silent(order: Spec, workers: list[Rank], timeout: float) -> PeerError:
    behind = min(w.progress for w in workers)
    silent = [w for w in workers if w.progress == behind]
    last = silent[0].events[-1]["event"] if behind else "its start"
    tails = "".join(f"\n--- last lines of {order.log(w.rank)}\n{_tail(order.log(w.rank))}" for w in silent)
    return PeerError(
        f"rank {' and rank '.join(str(w.rank) for w in silent)}: nothing heard for {timeout:.0f} s during "
        f"{Path(order.folder).name}, last sign of life: {last}{tails}",
        rank=silent[0].rank,
        path=str(order.log(silent[0].rank)),
        hint=_stale_lock()
        or "read the log; a first start compiles DeepSpeed's operators, give it a longer --timeout",
    )


def _stale_lock() -> str | None:
    """A build of DeepSpeed's operators that was killed leaves a lock, and the next one waits for ever."""
    stale = [str(lock.path) for lock in ops.find_stale_locks()]
    return f"python -m nvme_resume.ops unlock (a dead build left {', '.join(stale)})" if stale else None


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and whatever it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
