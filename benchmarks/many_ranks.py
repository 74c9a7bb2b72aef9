"""What grows with the number of ranks: the manifest, its commit, and one exchange between all ranks.

``python -m benchmarks.many_ranks``.  The exchanges are between real processes on this machine's cores, which are too
few for them: an upper bound.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.run import free_port
from nvme_resume import manifest
from nvme_resume.storage import commit
from tests.nodes import fakes


def committed(ranks: int) -> float:
    """Milliseconds from the finished staging folder to ``latest``."""
    found = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for turn in range(5):
            head = fakes.manifest(ranks, f"t{turn}")
            staging = fakes.stage(Path(folder), head)
            os.sync()
            start = time.perf_counter()
            commit.publish(Path(folder), staging, head, save_latest=True)
            found.append((time.perf_counter() - start) * 1000)
    return median(found)


def exchanged(ranks: int) -> float:
    """Milliseconds of one exchange between that many processes."""
    port = str(free_port())
    reader, writer = os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.write(writer, f"{_rank(rank, ranks)}\n".encode()) if rank == 0 else _rank(rank, ranks)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        return float(said.read())


def _rank(rank: int, ranks: int) -> float:
    import torch
    import torch.distributed as dist

    from nvme_resume.peers import Peers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    peers = Peers(120)
    found = []
    value = {"host": "ip-10-0-000-17.internal", "record": "0" * 32, "extras": "0" * 32, "bytes": 1 << 40}
    for _ in range(7):
        start = time.perf_counter()
        peers.exchange(value, None, "measurement")
        found.append((time.perf_counter() - start) * 1000)
    dist.barrier()
    return median(found[2:])


if __name__ == "__main__":
    import torch.distributed  # imported before the forks, which share it

    assert torch.distributed.is_available()
    sizes = [int(s) for s in sys.argv[1:]] or [8, 64]
    for count in (8, 64, 1024):
        size = len(manifest.encode(fakes.manifest(count)))
        print(f"{count} ranks: manifest {size / 1024:.1f} KiB, commit {committed(count):.1f} ms", flush=True)
    for count in sizes:
        print(f"{count} processes: an exchange takes {exchanged(count):.1f} ms", flush=True)
