"""The native copier beside copytree, cp, rsync, copy_file_range and fio: MiB/s, CPU seconds, page cache left behind.

``python -m benchmarks.copier MIB ROUNDS FOLDER``: variants take turns; JSON on the last line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import system
from nvme_resume.config import Options
from nvme_resume.storage import transfer

FILES = 8
COLD = "copytree + fsync, source cold"


def ours(engine: str) -> Callable[[Path, Path], None]:
    def copy(source: Path, target: Path) -> None:
        target.mkdir()
        copies = [transfer.Copy(p, target / p.name) for p in sorted(source.iterdir())]
        transfer.run(copies, Options(engine=engine), what="copy", sync=True)

    return copy


def copytree(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    system.fsync_tree(target)


def program(*command: str) -> Callable[[Path, Path], None]:
    def copy(source: Path, target: Path) -> None:
        subprocess.run([*command, f"{source}/.", str(target)], check=True)
        system.fsync_tree(target)

    return copy


def copy_file_range(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        with path.open("rb") as reader, (target / path.name).open("wb") as writer:
            while os.copy_file_range(reader.fileno(), writer.fileno(), 1 << 30):
                pass
            os.fsync(writer.fileno())


def fio(source: Path, target: Path) -> None:
    """One job reads the source while another writes as much to fresh files: the honest limit of the disk."""
    target.mkdir()
    size = sum(p.stat().st_size for p in source.iterdir())
    files = ":".join(str(p) for p in sorted(source.iterdir()))
    common = [
        "--direct=1",
        "--bs=4m",
        "--iodepth=8",
        "--ioengine=libaio",
        "--end_fsync=1",
        f"--nrfiles={FILES}",
    ]
    subprocess.run(
        [
            "fio",
            "--output=/dev/null",
            *common,
            "--name=read",
            "--rw=read",
            f"--filename={files}",
            f"--size={size}",
            "--name=write",
            "--rw=write",
            f"--directory={target}",
            f"--size={size}",
        ],
        check=True,
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    )


def variants() -> dict[str, tuple[bool, Callable[[Path, Path], None]]]:
    """Name -> (in another process?, copy)."""
    found: dict[str, tuple[bool, Callable[[Path, Path], None]]] = {
        "nvme_resume threads": (False, ours("threads")),
        "nvme_resume libaio": (False, ours("libaio")),
        COLD: (False, copytree),
        "copytree + fsync": (False, copytree),
        "cp + fsync": (True, program("cp", "-r")),
        "copy_file_range + fsync": (False, copy_file_range),
    }
    if shutil.which("rsync"):
        found["rsync + fsync"] = (True, program("rsync", "-a"))
    if shutil.which("fio"):
        found["fio, one reads, one writes"] = (True, fio)
    return found


def measure(mib: int, rounds: int, folder: Path) -> dict[str, Any]:
    """For each variant a list of {seconds, cpu, cache}, one a round."""
    source = folder / "source"
    source.mkdir(parents=True)
    block = os.urandom(1 << 20)
    for index in range(FILES):
        with (source / f"{index}.swp").open("wb") as file:
            for number in range(mib // FILES):
                file.write(number.to_bytes(8, "little") + block[8:])
    found: dict[str, Any] = {name: [] for name in variants()}
    for _ in range(rounds):
        for name, (outside, copy) in variants().items():
            cold = system.drop_caches()
            # The page cache is their ground; swap files, written with O_DIRECT, are never in it.
            warm = name != COLD and ("copy" in name or "cp" in name or "rsync" in name)
            if warm:
                for path in source.iterdir():
                    path.read_bytes()
            target = folder / "target"
            cache, cpu, start = system.page_cache(), system.cpu_seconds(children=outside), time.perf_counter()
            copy(source, target)
            found[name].append(
                {
                    "seconds": time.perf_counter() - start,
                    "cpu": system.cpu_seconds(children=outside) - cpu,
                    "cache": system.page_cache() - cache,
                    "source": "warm" if warm or not cold else "cold",
                }
            )
            shutil.rmtree(target)
    shutil.rmtree(source)
    return found


if __name__ == "__main__":
    size, count, where = sys.argv[1:]
    print(json.dumps(measure(int(size), int(count), Path(where))), flush=True)
