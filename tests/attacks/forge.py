"""Small checkpoints made by hand, sealed and consistent: what the tests then damage, or make lie.

No engine and no torch: the files of DeepSpeed are a few random bytes here.  ``Forge`` keeps every record as plain JSON
values until ``write``, which computes all digests, so that a record may say anything and still be what its writer
wrote.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import xxhash

from nvme_resume import layout
from nvme_resume.manifest import FORMAT, MASTER

NUMEL = 300


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def envelope(kind: str, body: Any, **changes: Any) -> bytes:
    """A record file whose digest is right."""
    whole = {"kind": kind, "format": FORMAT, "digest": digest(canonical(body)), "body": body, **changes}
    return json.dumps(whole, indent=1).encode() + b"\n"


def file_seal(data: bytes) -> dict[str, Any]:
    """As in docs/FORMAT.md, for less than one chunk."""
    chunk = xxhash.xxh3_128_digest(data) if data else b""
    return {"size": len(data), "digest": digest(chunk), "chunks": chunk.hex()}


class Forge:
    """The records and files of one checkpoint, to be changed at will before ``write``."""

    def __init__(self, tag: str = "t", world_size: int = 2, seed: int = 0) -> None:
        dice = random.Random(seed)
        self.tag = tag
        self.files: dict[str, bytes] = {}
        self.records: dict[int, dict[str, Any]] = {}
        self.extras: dict[int, dict[str, Any]] = {}
        self.seals: dict[int, dict[str, Any]] = {}
        identity = f"id-{tag}-{seed}"
        for rank in range(world_size):
            names = [
                layout.model_states(rank), layout.optim_states(rank, True), layout.extras_tensors(rank),
                *(layout.swap_path(rank, f"{key}0_0.tensor.swp") for key in ("", "exp_avg-", "exp_avg_sq-")),
            ]  # fmt: skip
            for name in names:
                self.files[name] = dice.randbytes(4 * NUMEL + 48)
            self.records[rank] = self._record(identity, rank, world_size, names)
            self.extras[rank] = {
                "checkpoint_id": identity, "rank": rank, "micro_steps": 5, "accumulation": None, "grad_scaler": None,
                "adam": [{"role": "optimizer", "beta1": 0.9, "beta2": 0.95, "anchor": 0, "step": 5}],
                "python_rng": None, "numpy_rng": None, "tensors_file": names[2],
            }  # fmt: skip
            self.seals[rank] = {
                "checkpoint_id": identity, "rank": rank, "record_digest": "",
                "files": {name: file_seal(self.files[name]) for name in names},
            }  # fmt: skip
        self.manifest: dict[str, Any] = {
            "checkpoint_id": identity, "tag": tag, "global_steps": 5, "world_size": world_size, "sealed": True,
            "created": "2026-01-01T00:00:00+00:00", "versions": {}, "settings": {},
            "ranks": [{"rank": r, "host": "h", "record": "", "extras": ""} for r in range(world_size)],
        }  # fmt: skip

    @classmethod
    def of(cls, folder: Path) -> Forge:
        """The records of a checkpoint that is there, to be written over it."""
        forge = cls.__new__(cls)
        forge.tag, forge.files = folder.name, {}

        def body(name: str) -> Any:
            return json.loads((folder / name).read_bytes())["body"]

        forge.manifest = body(layout.manifest())
        ranks = range(forge.manifest["world_size"])
        forge.records = {r: body(layout.rank_record(r)) for r in ranks}
        forge.extras = {r: body(layout.extras(r)) for r in ranks}
        forge.seals = {r: body(layout.seal(r)) for r in ranks}
        for rank in ranks:
            forge.seals[rank]["record_digest"] = ""
            forge.manifest["ranks"][rank] |= {"record": "", "extras": ""}
        return forge

    def rename(self, old: str, new: str, rank: int = 0) -> None:
        """Call a file of rank 0 something else, in all records."""
        for listed in (self.records[rank]["files"], self.seals[rank]["files"]):
            if old in listed:
                listed[new] = listed.pop(old)
        for group in self.records[rank]["sub_groups"]:
            for tensor in group["tensors"]:
                if tensor["file"] == old:
                    tensor["file"] = new
        for key in ("optim_file", "model_file"):
            if self.records[rank][key] == old:
                self.records[rank][key] = new

    def swap_file(self, number: int = 0) -> str:
        """A swap file of rank 0."""
        return str(self.records[0]["sub_groups"][0]["tensors"][number]["file"])

    def _record(self, identity: str, rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
        tensors = [
            {
                "key": key, "dtype": "float32", "numel": NUMEL, "where": "swap", "file": name, "nbytes": 4 * NUMEL,
                "flat": True,
            }
            for key, name in zip((MASTER, "exp_avg", "exp_avg_sq"), names[3:], strict=True)
        ]  # fmt: skip
        param = {
            "name": "w", "shape": [NUMEL * world_size], "numel": NUMEL * world_size, "partition_numel": NUMEL,
            "offset": 0, "padding": 0,
        }  # fmt: skip
        group = {
            "index": 0, "param_group": 0, "state_index": 0, "numel": NUMEL, "params": [param], "tensors": tensors,
            "scalars": {"step": 5},
        }  # fmt: skip
        hashed = names[:3]
        return {
            "checkpoint_id": identity, "tag": self.tag, "rank": rank, "world_size": world_size, "optimizer": "o",
            "master_dtype": "float32", "model_file": names[0], "optim_file": names[1], "sub_groups": [group],
            "frozen": [],
            "files": {
                name: {
                    "size": len(self.files[name]), "inode": None, "mtime_ns": None,
                    "digest": file_seal(self.files[name])["digest"] if name in hashed else None,
                }
                for name in names
            },
        }  # fmt: skip

    def write(self, save_dir: Path) -> Path:
        """The checkpoint as a folder, digests computed last; ``latest`` names it.  Files with bad names stay out."""
        folder = save_dir / self.tag
        for rank in self.records:
            mine = digest(canonical(self.records[rank]))
            self.seals[rank]["record_digest"] = self.seals[rank]["record_digest"] or mine
            for entry in self.manifest["ranks"]:
                if isinstance(entry, dict) and entry.get("rank") == rank:
                    entry["record"] = entry["record"] or mine
                    entry["extras"] = entry["extras"] or digest(canonical(self.extras[rank]))
        written = {layout.manifest(): envelope("manifest", self.manifest), **self.files}
        for rank in self.records:
            written[layout.rank_record(rank)] = envelope("rank", self.records[rank])
            written[layout.extras(rank)] = envelope("extras", self.extras[rank])
            written[layout.seal(rank)] = envelope("seal", self.seals[rank])
        for name, data in written.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # it may be a link to a sound one
            path.write_bytes(data)
        (save_dir / layout.LATEST).write_text(self.tag)
        return folder
