"""A checkpoint opened for reading: ours (with records) or plain DeepSpeed's, behind one face."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from safetensors import safe_open

from nvme_resume import layout
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError
from nvme_resume.manifest import Extras, FileSeal, RankRecord, TensorRecord
from nvme_resume.storage import records, verify
from nvme_resume.zero3 import pt_files, stock


class Checkpoint:
    """One tag folder.  Files and records are opened on first use and kept."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self.folder = folder
        self.tag = folder.name
        self.ours = records.has_manifest(folder)
        self._engine = engine
        self._extras: dict[int, Extras] = {}
        self._seals: dict[int, dict[str, FileSeal] | None] = {}
        self._records: dict[int, RankRecord] = {}
        self._optim = lru_cache(maxsize=None)(self._open_optim)
        self._model = lru_cache(maxsize=None)(self._open_model)
        if self.ours:
            self.head = records.read_manifest(folder)
            if self.head.tag != folder.name:
                raise CorruptError(
                    "this folder holds another tag",
                    path=str(folder),
                    expected=folder.name,
                    found=self.head.tag,
                )
            self.world_size = self.head.world_size
        else:
            self.world_size = stock.world_size(folder)

    @classmethod
    def beside_stock(cls, folder: Path, engine: Any, extras: Extras) -> Checkpoint:
        """A checkpoint that plain DeepSpeed wrote and loaded, with our extras beside it."""
        checkpoint = cls.__new__(cls)
        checkpoint.folder, checkpoint.tag, checkpoint.ours = folder, folder.name, False
        checkpoint._engine, checkpoint._seals, checkpoint._records = engine, {}, {}
        checkpoint._extras = {extras.rank: extras}
        return checkpoint

    def record(self, rank: int) -> RankRecord:
        """What saved rank ``rank`` saved."""
        if rank not in self._records:
            if self.ours:
                record, seal, extras = records.read_rank(self.folder, self.head, rank)
                # Kinds and sizes first: nothing is opened that is no regular file of the right size.
                verify.structure(self.folder, record.files, rank=rank, tag=self.tag)
                if seal is None:
                    verify.untouched(self.folder, record.files, rank=rank, tag=self.tag)
                self._seals[rank], self._extras[rank] = None if seal is None else seal.files, extras
                if record.model_file != layout.model_states(rank):  # DeepSpeed opens it by that name
                    raise CorruptError(
                        "record names another model file",
                        rank=rank,
                        tag=self.tag,
                        path=str(self.folder / layout.rank_record(rank)),
                        expected=layout.model_states(rank),
                        found=record.model_file[:200],
                    )
            else:
                record = stock.synthesize(self.folder, rank, self._engine)
                if (self.folder / layout.extras(rank)).is_file():  # an engine without NVMe, wrapped by us
                    self._extras[rank] = records.read(self.folder, layout.extras(rank), Extras)
            self._records[rank] = record
        return self._records[rank]

    def opened(self) -> set[int]:
        """Saved ranks whose records were read."""
        return set(self._records)

    def sealed(self, rank: int) -> bool:
        """Are the hashes of all of a rank's files known?"""
        self.record(rank)
        return self._seals.get(rank) is not None

    def seals(self, rank: int) -> dict[str, FileSeal]:
        """Sizes and hashes of a rank's files; empty where none were taken."""
        self.record(rank)
        return self._seals.get(rank) or {}

    def check_hashes(self, rank: int, names: Iterable[str], options: Options) -> None:
        """CorruptError unless these files are what was saved, as far as their hashes are known.

        Every byte, or some chunks of each where the options say ``sampled``.
        """
        listed = self.record(rank).files
        wanted = {n: digest for n in names if n in listed and (digest := self._digest(rank, n)) is not None}
        level = verify.sampled if options.verify == "sampled" else verify.full
        level(self.folder, wanted, options, rank=rank, tag=self.tag)

    def _digest(self, rank: int, name: str) -> FileSeal | None:
        sealed = self.seals(rank).get(name)
        listed = self.record(rank).files[name]
        if sealed is not None or listed.digest is None:
            return sealed
        return FileSeal(size=listed.size, digest=listed.digest, chunks="")

    def extras(self, rank: int) -> Extras | None:
        """The small state of a rank, None where plain DeepSpeed saved."""
        if rank not in self._extras:
            self.record(rank)
        return self._extras.get(rank)

    def path(self, rank: int, relative: str) -> Path:
        """A file of the checkpoint, checked to lie inside."""
        return verify.path_of(self.folder, relative, rank=rank, tag=self.tag)

    def optim(self, rank: int) -> pt_files.OptimFile:
        """DeepSpeed's optimizer file of a saved rank."""
        return self._optim(rank)

    def _open_optim(self, rank: int) -> pt_files.OptimFile:
        relative = self.record(rank).optim_file
        return pt_files.OptimFile(self.path(rank, relative), self._trust(rank, relative))

    def _trust(self, rank: int, relative: str) -> Callable[[], None]:
        """What must hold before a file is unpickled: our hash matches, where there is one."""

        def verified() -> None:
            self.check_hashes(rank, [relative], Options())

        return verified if self.ours else stock.as_deepspeed_does

    def model(self, rank: int) -> dict[str, Any]:
        """DeepSpeed's model file of a saved rank."""
        return self._model(rank)

    def _open_model(self, rank: int) -> dict[str, Any]:
        relative = self.record(rank).model_file
        return pt_files.load(self.path(rank, relative), self._trust(rank, relative))

    def find(self, rank: int, sub_group: int, key: str) -> TensorRecord:
        """The record of one flat tensor."""
        for tensor in self.record(rank).sub_groups[sub_group].tensors:
            if tensor.key == key:
                return tensor
        raise CorruptError(f"rank record lacks {key!r} of sub-group {sub_group}", rank=rank, tag=self.tag)

    def pt_tensor(self, rank: int, sub_group: int, key: str) -> torch.Tensor:
        """A tensor that is kept in the optimizer file, checked against its record."""
        record = self.find(rank, sub_group, key)
        group = self.record(rank).sub_groups[sub_group]
        tensor = self.optim(rank).tensor(sub_group, group.state_index, key)
        if tensor.numel() != record.numel:
            raise CorruptError(
                f"{key!r} of sub-group {sub_group} has the wrong size",
                rank=rank,
                tag=self.tag,
                path=str(self.optim(rank).path),
                expected=record.numel,
                found=tensor.numel(),
            )
        return tensor

    def frozen_fragment(self, rank: int, name: str) -> torch.Tensor:
        """A frozen parameter's partition from DeepSpeed's model file."""
        fragments = self.model(rank).get(FROZEN_PARAM_FRAGMENTS) or {}
        if name not in fragments:
            raise CorruptError(f"model file lacks frozen parameter {name!r}", rank=rank, tag=self.tag)
        fragment: torch.Tensor = fragments[name]
        return fragment.detach().flatten()

    def extras_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """The byte tensors of a rank's extras."""
        extras = self.extras(rank)
        if extras is None or extras.tensors_file is None:
            return {}
        with safe_open(self.path(rank, extras.tensors_file), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator there
