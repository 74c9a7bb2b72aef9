"""Two nodes with disks of their own: how fast parts are gathered, beside rsync, and what that costs a save.

``python -m benchmarks.nodes FOLDER`` (root: the nodes are network namespaces on one bridge).  Both nodes share this
machine's cores and its disk, so the figures are ratios, not what two machines do.  JSON on the last line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.nodes.namespaces import Hosts

ROOT = Path(__file__).resolve().parent.parent
PORT = "29517"
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "gather": {"gather": "main"},
    "replicas": {"replicas": 1},
}
DAEMON = """
use chroot = no
[node0]
path = {path}
read only = no
uid = root
gid = root
"""


def worker(what: str, gigabytes: float, rounds: int, options: str, folder: Path) -> dict[str, list[float]]:
    """One rank, which is one node."""
    import torch.distributed as dist

    from benchmarks import engine as bench

    rank = int(os.environ["RANK"])
    node = folder / f"node{rank}"
    node.mkdir(parents=True, exist_ok=True)
    os.chdir(node)
    engine = bench.build(gigabytes, node / "nvme", json.loads(options))
    bench.step(engine)
    return (gather if what == "gather" else stall)(engine, rank, node, rounds, dist)


def gather(engine: Any, rank: int, node: Path, rounds: int, dist: Any) -> dict[str, list[float]]:
    """Seconds from the commit until the master has all, and of rsync for the same files."""
    found: dict[str, list[float]] = {"gather": [], "rsync": [], "mib": []}
    for turn in range(rounds):
        tag = f"t{turn}"
        with engine.inside_larger_checkpoint():  # so that the parts do not go at once
            engine.save_checkpoint("ck", tag=tag)
        for name in ("gather", "rsync") if turn % 2 == 0 else ("rsync", "gather"):
            drop_caches()
            dist.barrier()
            start = time.perf_counter()
            if name == "gather":
                engine.committed_as(Path("ck"))
                engine.wait_for_checkpoint()
            elif rank == 1:
                command = ["rsync", "-a", "--whole-file", "--fsync", f"{node}/ck/{tag}/"]
                subprocess.run([*command, "rsync://10.213.0.1/node0/"], check=True)
            dist.barrier()
            found[name].append(time.perf_counter() - start)
        own = [p for p in (node.parent / "node1" / "ck" / tag).rglob("*") if p.is_file()]
        found["mib"].append(sum(p.stat().st_size for p in own) / (1 << 20))
        dist.barrier()
        if rank == 0:
            for entry in (node.parent / "rsync").iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        shutil.rmtree(f"ck/{tag}")
        dist.barrier()
    return found


def stall(engine: Any, rank: int, node: Path, rounds: int, dist: Any) -> dict[str, list[float]]:
    """Seconds that saves block, the parts of the save before being on their way; and of the steps between."""
    from benchmarks import engine as bench

    found: dict[str, list[float]] = {"blocked": [], "step": []}
    for turn in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        engine.save_checkpoint("ck", tag=f"t{turn}")
        blocked = time.perf_counter() - start
        steps = [bench.step(engine) for _ in range(2)]
        if turn:  # the first opens the connections
            found["blocked"].append(blocked)
            found["step"] += steps
    engine.wait_for_checkpoint()
    return found


def drop_caches() -> None:
    """So that both read from the disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def nodes(
    hosts: Hosts, what: str, gigabytes: float, rounds: int, options: dict[str, Any], folder: Path
) -> Any:
    """What the first node measured."""
    arguments = ["worker", what, str(gigabytes), str(rounds), json.dumps(options), str(folder)]
    running = []
    for rank, (name, more) in enumerate(zip(hosts.names, hosts.environments(), strict=True)):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": PORT}
        with (folder / f"{what}.{rank}.log").open("w") as log:
            running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.nodes", *arguments],
                    cwd=ROOT,
                    env={**os.environ, **more, **place},
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        logs = "\n".join((folder / f"{what}.{rank}.log").read_text()[-2000:] for rank in (0, 1))
        sys.exit(f"{what} failed:\n{logs}")
    shutil.rmtree(folder / "node0")
    shutil.rmtree(folder / "node1")
    return json.loads(said[0].splitlines()[-1])


def main(folder: Path, gigabytes: float = 1.0, rounds: int = 4) -> None:
    """Measure and print."""
    if shutil.which("rsync") is None:
        sys.exit("rsync is needed to compare with: apt-get install rsync")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rsync").mkdir(exist_ok=True)
    hosts = Hosts(2)
    try:
        hosts.make()
        config = folder / "rsyncd.conf"
        config.write_text(DAEMON.format(path=folder / "rsync"))
        command = ["rsync", "--daemon", "--no-detach", "--port=873", f"--config={config}"]
        daemon = subprocess.Popen(["ip", "netns", "exec", hosts.names[0], *command])
        before = {"gather": "main", "seal": "before_commit"}
        results: dict[str, Any] = {"gather": nodes(hosts, "gather", gigabytes, rounds, before, folder)}
        daemon.terminate()
        stalls: dict[str, dict[str, list[float]]] = {name: {"blocked": [], "step": []} for name in OPTIONS}
        for _ in range(2):
            for name, options in OPTIONS.items():
                for key, values in nodes(hosts, "stall", 0.3, 5, options, folder).items():
                    stalls[name][key] += values
        results["stall"] = stalls
    finally:
        hosts.remove()
        shutil.rmtree(folder, ignore_errors=True)
    found = results["gather"]
    for name in ("gather", "rsync"):
        print(name, "MiB/s:", [round(m / s) for m, s in zip(found["mib"], found[name], strict=True)])
    for name, values in stalls.items():
        line = {key: round(median(v) * 1000, 1) for key, v in values.items()}
        print(name, "medians in ms:", line, "blocked:", [round(v * 1000) for v in values["blocked"]])
    print(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        kind, size, count, chosen, where = sys.argv[2:]
        print(json.dumps(worker(kind, float(size), int(count), chosen, Path(where))), flush=True)
        os._exit(0)
    main(Path(sys.argv[1]))
