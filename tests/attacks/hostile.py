"""Hostile checkpoints: every digest is right, and what the records say is meant to harm.

Each builder changes the records of a ``Forge`` before they are written, or the folder afterwards.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvme_resume import layout
from tests.attacks.forge import Forge, digest, envelope

RECORDS: dict[str, Callable[[Forge], None]] = {}
FOLDERS: dict[str, Callable[[Path], None]] = {}


def of_records(builder: Callable[[Forge], None]) -> Callable[[Forge], None]:
    RECORDS[builder.__name__] = builder
    return builder


def of_folder(builder: Callable[[Path], None]) -> Callable[[Path], None]:
    FOLDERS[builder.__name__] = builder
    return builder


def group(forge: Forge) -> dict[str, Any]:
    found: dict[str, Any] = forge.records[0]["sub_groups"][0]
    return found


# ---- paths ----


def names(name: str) -> Callable[[Forge], None]:
    return lambda forge: forge.rename(forge.swap_file(), name)


RECORDS |= {
    "absolute path": names("/etc/passwd"),
    "dotdot": names("../../outside"),
    "dotdot in the middle": names("offloaded_tensors/rank00/../../../outside"),
    "NUL": names("offloaded_tensors/rank00/a\0b"),
    "empty path": names(""),
    "the folder itself": names("."),
    "a folder": names("offloaded_tensors/rank00"),
    "lone surrogate": names("offloaded_tensors/rank00/\ud800"),
    "long name": names("offloaded_tensors/rank00/" + "x" * 300),
    "long path": names("offloaded_tensors/rank00/" + "x/" * 3000 + "x"),
    "the manifest": names(layout.manifest()),
    "a record": names(layout.rank_record(0)),
    "newline": names("offloaded_tensors/rank00/a\nb"),
}


@of_records
def another_rank_s_file(forge: Forge) -> None:
    other = layout.swap_path(1, "0_0.tensor.swp")
    old = forge.swap_file()
    forge.rename(old, other)
    if 1 in forge.seals:
        forge.seals[0]["files"][other] = forge.seals[1]["files"][other]


@of_records
def one_file_under_two_names(forge: Forge) -> None:
    first, second = forge.swap_file(0), forge.swap_file(1)
    alias = first.replace("offloaded_tensors/", "offloaded_tensors/./")
    forge.seals[0]["files"][second] = dict(forge.seals[0]["files"][first])
    forge.rename(second, alias)


@of_records
def two_tensors_in_one_file(forge: Forge) -> None:
    group(forge)["tensors"][1]["file"] = forge.swap_file(0)


@of_records
def model_file_of_another_rank(forge: Forge) -> None:
    forge.rename(forge.records[0]["model_file"], layout.model_states(7))


# ---- numbers ----


def size_of_file(size: Any) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        name = forge.swap_file()
        forge.records[0]["files"][name]["size"] = size
        forge.seals[0]["files"][name]["size"] = size

    return change


def tensor_with(**changes: Any) -> Callable[[Forge], None]:
    return lambda forge: group(forge)["tensors"][0].update(changes)


def param_with(**changes: Any) -> Callable[[Forge], None]:
    return lambda forge: group(forge)["params"][0].update(changes)


RECORDS |= {
    "size 2^63": size_of_file(1 << 63),
    "size 2^62 - 1": size_of_file((1 << 62) - 1),
    "size negative": size_of_file(-1),
    "size as text": size_of_file("1248"),
    "size true": size_of_file(True),
    "size a float": size_of_file(1248.0),
    "size NaN": size_of_file(float("nan")),
    "size 10^400": size_of_file(10**400),
    "nbytes beyond the file": tensor_with(nbytes=1 << 40),
    "numel huge": tensor_with(numel=1 << 61, nbytes=(1 << 61) * 4 % (1 << 62)),
    "offset overflows": param_with(offset=(1 << 62) - 1),
    "offset overlaps": lambda forge: group(forge)["params"].append(
        {**group(forge)["params"][0], "name": "x"}
    ),
    "shape and numel differ": param_with(shape=[1 << 30, 1 << 30]),
    "shape negative": param_with(shape=[-1, -300]),
    "partition beyond the parameter": param_with(partition_numel=(1 << 61)),
    "step NaN": lambda forge: group(forge)["scalars"].update(step=float("nan")),
    "step Infinity": lambda forge: group(forge)["scalars"].update(step=float("inf")),
    "step negative": lambda forge: group(forge)["scalars"].update(step=-1),
    "step 10^300": lambda forge: group(forge)["scalars"].update(step=10**300),
    "adam steps": lambda forge: forge.extras[0]["adam"].append(
        {"role": "optimizer", "beta1": 0.9, "beta2": 0.95, "anchor": 0, "step": 1 << 60}
    ),
    "adam beta NaN": lambda forge: forge.extras[0]["adam"].append(
        {"role": "optimizer", "beta1": float("nan"), "beta2": 0.95, "anchor": 0, "step": 5}
    ),
    "dtype unknown": tensor_with(dtype="__import__('os')"),
    "where unknown": tensor_with(where="http"),
    "frozen parameter of a wrong size": lambda forge: forge.records[0]["frozen"].append(
        {"name": "f", "shape": [2], "numel": 1 << 61, "partition_numel": 1, "dtype": "float32", "file": None}
    ),
}

# ---- types ----


def manifest_with(**changes: Any) -> Callable[[Forge], None]:
    return lambda forge: forge.manifest.update(changes)


def record_with(**changes: Any) -> Callable[[Forge], None]:
    return lambda forge: forge.records[0].update(changes)


def extras_with(**changes: Any) -> Callable[[Forge], None]:
    return lambda forge: forge.extras[0].update(changes)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


GOOD_NUMPY = {"bit_generator": "MT19937", "key": [1] * 624, "pos": 3, "has_gauss": 0, "gauss": 0.0}
GOOD_PYTHON = [3, [1] * 624 + [624], None]

RECORDS |= {
    "files a list": record_with(files=[1, 2]),
    "sub-groups null": record_with(sub_groups=None),
    "unknown field": record_with(__class__="x"),
    "files null": record_with(files={"a": None}),
    "manifest a list": lambda forge: forge.__setattr__("manifest", {"ranks": [], "x": []}),
    "random state too short": extras_with(python_rng=[3, [1, 2], None], numpy_rng=GOOD_NUMPY),
    "random state of text": extras_with(python_rng=[3, ["a"] * 625, None], numpy_rng=GOOD_NUMPY),
    "random state out of range": extras_with(python_rng=[3, [1 << 70] * 625, None], numpy_rng=GOOD_NUMPY),
    "random state with a far position": extras_with(
        python_rng=[3, [1] * 624 + [10**6], None], numpy_rng=GOOD_NUMPY
    ),
    "numpy state without key": extras_with(python_rng=GOOD_PYTHON, numpy_rng={"bit_generator": "MT19937"}),
    "numpy state of another generator": extras_with(
        python_rng=GOOD_PYTHON, numpy_rng={**GOOD_NUMPY, "bit_generator": "PCG64"}
    ),
    "numpy state with a far position": extras_with(
        python_rng=GOOD_PYTHON, numpy_rng={**GOOD_NUMPY, "pos": 10**6}
    ),
    "numpy state with negative words": extras_with(
        python_rng=GOOD_PYTHON, numpy_rng={**GOOD_NUMPY, "key": [-1] * 624}
    ),
    "nested 150": extras_with(python_rng=nested(150), numpy_rng=GOOD_NUMPY),
    "nested 600": extras_with(python_rng=nested(600), numpy_rng=GOOD_NUMPY),
    # ---- ranks and tags ----
    "world size 10^9": manifest_with(world_size=10**9),
    "world size 0": manifest_with(world_size=0, ranks=[]),
    "world size of the record": record_with(world_size=1 << 40),
    "tag of the record": record_with(tag="other"),
    "tag dotdot": manifest_with(tag=".."),
    "tag with a slash": manifest_with(tag="a/../t"),
    "tag that looks the same": manifest_with(tag="t\u200b"),
    "tag right to left": manifest_with(tag="\u202et"),
    "global steps Infinity": manifest_with(global_steps=float("inf")),
    "host a number": lambda forge: forge.manifest["ranks"][0].update(host=5),
}


@of_records
def ranks_twice(forge: Forge) -> None:
    forge.manifest["ranks"] = [dict(forge.manifest["ranks"][0]) for _ in forge.manifest["ranks"]]
    forge.manifest["ranks"].append(dict(forge.manifest["ranks"][0]))


@of_records
def thousands_of_ranks_and_none_there(forge: Forge) -> None:
    forge.manifest["world_size"] = 5000
    forge.manifest["ranks"] = [
        {"rank": r, "host": "h", "record": "0" * 32, "extras": "0" * 32} for r in range(5000)
    ]


@of_records
def ranks_out_of_order(forge: Forge) -> None:
    forge.manifest["ranks"] = [dict(e, rank=len(forge.records) - e["rank"]) for e in forge.manifest["ranks"]]


# ---- what stands in the folder ----


def manifest_is(data: bytes) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / layout.manifest()).write_bytes(data)

    return put


FOLDERS |= {
    "manifest: nested 100000": manifest_is(b"[" * 100_000),
    "manifest: duplicate keys": manifest_is(
        b'{"kind": "rank", "kind": "manifest", "format": 1, "digest": "0", "body": {}}'
    ),
    "manifest: not unicode": manifest_is(b"\xff\xfe\x00"),
    "manifest: a long number": manifest_is(
        b'{"kind":"manifest","format":1,"digest":"","body":' + b"9" * 100_000 + b"}"
    ),
    "manifest: format a long number": manifest_is(
        b'{"kind":"manifest","format":' + b"9" * 4000 + b',"digest":"","body":{}}'
    ),
    "manifest: kind of a megabyte": manifest_is(
        b'{"kind":"' + b"x" * (1 << 20) + b'","format":1,"digest":"","body":{}}'
    ),
    "manifest: pickle": manifest_is(b"\x80\x04\x95\x1d\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94"),
}


def nested_record(depth: int) -> bytes:
    """With the right digest, made without recursion."""
    body = b"[" * depth + b"]" * depth
    return envelope("manifest", 0, digest=digest(body)).replace(b'"body": 0', b'"body": ' + body)


for depth in (100, 190, 300, 480, 495, 900, 960, 980, 990, 995, 1000):
    FOLDERS[f"manifest: nested {depth}"] = manifest_is(nested_record(depth))


@of_folder
def manifest_of_300_megabytes(folder: Path) -> None:
    with (folder / layout.manifest()).open("wb") as file:
        file.truncate(300 << 20)


@of_folder
def manifest_is_a_fifo(folder: Path) -> None:
    (folder / layout.manifest()).unlink()
    os.mkfifo(folder / layout.manifest())


@of_folder
def manifest_is_a_device(folder: Path) -> None:
    (folder / layout.manifest()).unlink()
    if os.geteuid() == 0:
        os.mknod(folder / layout.manifest(), stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    else:
        (folder / layout.manifest()).symlink_to("/dev/zero")


@of_folder
def manifest_is_a_symlink(folder: Path) -> None:
    _elsewhere(folder / layout.manifest())


@of_folder
def record_is_a_symlink(folder: Path) -> None:
    _elsewhere(folder / layout.rank_record(0))


@of_folder
def seal_is_a_dangling_symlink(folder: Path) -> None:
    (folder / layout.seal(0)).unlink()
    (folder / layout.seal(0)).symlink_to("nowhere")


@of_folder
def records_lie_elsewhere(folder: Path) -> None:
    _elsewhere(folder / layout.RECORDS)


@of_folder
def swap_files_lie_elsewhere(folder: Path) -> None:
    _elsewhere(folder / layout.SWAP)


@of_folder
def a_swap_file_lies_elsewhere(folder: Path) -> None:
    _elsewhere(next((folder / layout.SWAP / layout.rank_folder(0)).iterdir()))


@of_folder
def a_model_file_lies_elsewhere(folder: Path) -> None:
    _elsewhere(folder / layout.model_states(0))


@of_folder
def symlinks_in_a_circle(folder: Path) -> None:
    shutil.rmtree(folder / layout.SWAP)
    (folder / layout.SWAP).symlink_to(layout.SWAP)


def _elsewhere(path: Path) -> None:
    outside = next(p for p in path.parents if (p / layout.LATEST).exists()).parent / "outside"
    outside.mkdir(exist_ok=True)
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)


def build(name: str, forge: Forge, save_dir: Path) -> Path:
    """The hostile checkpoint of that name."""
    if name in RECORDS:
        RECORDS[name](forge)
    folder = forge.write(save_dir)
    if name in FOLDERS:
        FOLDERS[name](folder)
    return folder


ALL = [*RECORDS, *FOLDERS]
