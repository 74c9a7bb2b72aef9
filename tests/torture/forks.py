"""Processes forked from one that has imported torch and DeepSpeed and has done nothing with them yet.

Importing both takes ten seconds, a fork none.  The parent must have one thread and no engine or process group ever.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # DeepSpeed imports the compiler, which would start helpers
}


def preload() -> None:
    """Import and compile all that a training process needs.  Set ENVIRONMENT before."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    import cpuinfo
    import deepspeed
    import torch._dynamo
    import torch._inductor.compile_fx
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 - imported by every engine

    import nvme_resume.engine  # noqa: F401
    from tests import training  # noqa: F401

    for builder in (AsyncIOBuilder, CPUAdamBuilder, ShareMemCommBuilder):
        builder().load(verbose=False)
    deepspeed.ops.__compatible_ops__  # noqa: B018 - compiles small programs to find out
    torch.set_printoptions(threshold=0, edgeitems=0)  # DeepSpeed makes texts of whole parameters
    facts = cpuinfo.get_cpu_info()  # starts a process and takes a second, for every CPUAdam
    cpuinfo.get_cpu_info = lambda: facts
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1 or torch.distributed.is_initialized():
        raise RuntimeError(f"a process with {threads} threads cannot be forked")
    gc.collect()
    gc.freeze()


@dataclass
class End:
    """How a forked process ended."""

    pid: int
    killed: bool = False  # by SIGKILL, its own
    hung: bool = False
    seconds: float = 0.0
    report: dict[str, Any] | None = None
    log: str = ""


class Child:
    """A forked process that does ``work`` and reports what that returns, as JSON."""

    def __init__(self, work: Callable[[], dict[str, Any]], report: Path) -> None:
        self._report = report
        self._log = report.with_suffix(".log")
        self._start = time.monotonic()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(work, parent)
        self._descriptor = os.pidfd_open(self.pid)

    def _be(self, work: Callable[[], dict[str, Any]], parent: int) -> None:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                found = work()
                code = 0
            except BaseException as error:
                traceback.print_exc()
                found = {"error": type(error).__name__, "text": str(error)[:1000]}
            temporary = self._report.with_suffix(".part")
            temporary.write_text(json.dumps(found))
            temporary.rename(self._report)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # no exit handlers: those are the parent's

    def wait(self, until: float) -> End:
        """Its end; one that lasts beyond ``until`` (monotonic) is ended and reported as hung."""
        hung = not select.select([self._descriptor], [], [], max(0.0, until - time.monotonic()))[0]
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._descriptor)
        found = json.loads(self._report.read_text()) if self._report.is_file() else None
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        log = self._log.read_text(errors="replace")[-3000:] if self._log.is_file() else ""
        return End(self.pid, killed and not hung, hung, round(time.monotonic() - self._start, 3), found, log)

    def forget(self) -> None:
        """Remove its report and log."""
        for path in (self._report, self._log):
            path.unlink(missing_ok=True)


def side_by_side(
    work: Callable[[int], dict[str, Any]], ranks: int, folder: Path, name: str, seconds: float
) -> list[End]:
    """Fork one process a rank, joined in a process group of their own, and wait for all."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        children = [
            Child(lambda rank=rank: _join(work, rank, ranks, port, listener), folder / f"{name}.{rank}.json")
            for rank in range(ranks)
        ]
    until = time.monotonic() + seconds
    return [child.wait(until) for child in children]


def _join(
    work: Callable[[int], dict[str, Any]], rank: int, ranks: int, port: int, listener: socket.socket
) -> dict[str, Any]:
    import torch

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": "0",  # else DeepSpeed's ranks wait for each other in shared memory, for a dead one for ever
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    store: Any
    if ranks == 1:
        store = torch.distributed.HashStore()
    else:
        # Rank 0 takes over the listening socket: nobody else can have the port meanwhile.
        descriptor = os.dup(listener.fileno()) if rank == 0 else None
        listener.close()
        store = torch.distributed.TCPStore("127.0.0.1", port, ranks, rank == 0, master_listen_fd=descriptor)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return work(rank)
