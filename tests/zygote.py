"""Start the ranks of tests quickly: a process that has imported torch, DeepSpeed and transformers, and waits.

Importing them takes 4 to 10 seconds of a core, and the tests start hundreds of ranks.  Each rank is a fork of this one:
a process of its own, with its own arguments, environment, log and end, that inherits imported modules and nothing that
ran.  One such process for each pytest process; it ends with it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.05
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000


class Child:
    """A rank: what ``subprocess.Popen`` offers and the tests use."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid = pid
        self._code = code

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Server:
    """This side of the pipe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(
        self, module: str, arguments: list[str], environment: dict[str, str], cwd: Path, log: Path
    ) -> Child:
        code = log.with_name(f"{log.name}.code")
        code.unlink(missing_ok=True)
        umask = os.umask(0)
        os.umask(umask)
        request = {"module": module, "arguments": arguments, "environment": environment, "cwd": str(cwd),
                   "log": str(log), "code": str(code), "umask": umask}  # fmt: skip
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.zygote"],
                    cwd=cwd,
                    env={
                        **os.environ,
                        "DS_ACCELERATOR": "cpu",
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(cwd),
                    },
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                atexit.register(process.kill)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        assert answer, "the process that starts ranks has died"
        return Child(int(answer), code)


start = _Server().start


def _imports() -> None:
    import deepspeed
    import transformers.models.llama.modeling_llama
    import transformers.trainer

    assert deepspeed and transformers  # type: ignore[truthy-function]


def _serve() -> dict[str, Any]:
    """Fork for every request; in the child, return the request."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    # jemalloc (pyarrow's) starts its thread again in the child; no other would be there.
    assert len(set(names) - {"jemalloc_bg_thd"}) == 1, names
    codes: dict[int, Path] = {}
    while True:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
            if not line:
                os._exit(0)  # whoever asked is gone
            request: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return request
            codes[pid] = Path(request["code"])
            os.write(1, f"{pid}\n".encode())
        while codes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            path = codes.pop(pid)
            temporary = path.with_suffix(".new")
            temporary.write_text(str(os.waitstatus_to_exitcode(status)))
            temporary.rename(path)


def _become(request: dict[str, Any]) -> None:
    """What a new interpreter would have done for ``python -m module arguments``."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    _move_to(os.environ.get("NVR_TEST_NAMESPACE"))
    random.seed()
    import numpy as np
    import torch

    np.random.seed()
    torch.seed()


def _move_to(namespace: str | None) -> None:
    """Be on another host, as far as the network and the host's name go."""
    if namespace is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    assert libc.setns(descriptor, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(_CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(namespace)
    os.close(descriptor)


if __name__ == "__main__":
    _imports()
    found = _serve()
    _become(found)
    runpy.run_module(found["module"], run_name="__main__", alter_sys=True)
