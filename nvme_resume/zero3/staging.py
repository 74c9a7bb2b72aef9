"""First half of a load: check everything and put the swap files, verified, beside the live ones.

Nothing the engine can see is touched here.  Copies land in a private folder inside the swap folder (same
filesystem, so the second half is a rename for each file); their hashes are taken on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nvme_resume import layout, plan
from nvme_resume.config import Options
from nvme_resume.manifest import MASTER, FileSeal, TensorRecord
from nvme_resume.storage import disk as seam
from nvme_resume.storage import transfer, verify
from nvme_resume.storage.transfer import Copy
from nvme_resume.zero3.source import Checkpoint


@dataclass
class Staged:
    """Files waiting to replace live ones: (staged path, public path)."""

    renames: list[tuple[Path, Path]] = field(default_factory=list)
    folders: set[Path] = field(default_factory=set)

    def add(self, public: Path, load_id: str) -> Path:
        """The staging path for a public file."""
        folder = public.parent / f"{layout.INCOMING_PREFIX}{load_id}"
        if folder not in self.folders:
            seam.current().make_folder(folder)
            self.folders.add(folder)
        staged = folder / public.name
        self.renames.append((staged, public))
        return staged

    def publish(self) -> None:
        """Replace the live files."""
        for staged, public in self.renames:
            seam.current().rename(staged, public)
        self.discard()

    def discard(self) -> None:
        """Remove what is staged."""
        for folder in self.folders:
            seam.current().remove_tree(folder)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def swaps_to_file(engine: Any, sub_group: int, key: str) -> bool:
    """Does this engine keep tensor ``key`` of the sub-group in a swap file?"""
    optimizer = engine.optimizer
    in_memory = getattr(optimizer, "use_muon", False) and optimizer.save_muon_momentum_buffer_in_memory
    return bool(optimizer._swappable_optimizer_subgroup(sub_group)) and not (
        key == "momentum_buffer" and in_memory
    )


def swap_file(engine: Any, sub_group: int, key: str) -> Path:
    """The public path of a swapped tensor (``optimizer_utils.py::SwapTensorContext``)."""
    optimizer = engine.optimizer
    ds_id = optimizer.fp32_partitioned_groups_flat[sub_group].ds_id
    name = f"{ds_id}.tensor.swp" if key == MASTER else f"{key}-{ds_id}.tensor.swp"
    return Path(optimizer.optimizer_swapper.swap_folder) / name


class Stager:
    """Collects the copies of one rank, runs them, compares hashes."""

    def __init__(self, checkpoint: Checkpoint, options: Options, rank: int, load_id: str) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.rank = rank
        self.load_id = load_id
        self.staged = Staged()
        self._whole: list[tuple[Copy, int, str]] = []  # copy, saved rank, relative name
        self._ranges: list[Copy] = []
        self._to_hash: set[tuple[int, str]] = set()

    def stage_swapped(self, engine: Any, source: plan.Source, key: str) -> None:
        """Plan the swap file of one flat tensor of the present engine."""
        swapper = engine.optimizer.optimizer_swapper
        numel = int(engine.optimizer.fp16_partitioned_groups_flat_numel[source.target])
        size = swapper._io_aligned_numel(numel) * swapper.swap_element_size
        target = self.staged.add(swap_file(engine, source.target, key), self.load_id)
        if source.whole:
            (only,) = source.segments
            tensor = self.checkpoint.find(only.rank, only.sub_group, key)
            sealed = self.checkpoint.seals(only.rank).get(tensor.file)
            if tensor.where == "swap" and sealed is not None and sealed.size == size:
                self._whole.append((Copy(self._use(only.rank, tensor), target), only.rank, tensor.file))
                return
        transfer.write_padded(target, memoryview(b""), size)
        element = swapper.swap_element_size
        for segment in source.segments:
            tensor = self.checkpoint.find(segment.rank, segment.sub_group, key)
            if tensor.where == "swap":
                path = self._use(segment.rank, tensor)
                self._to_hash.add((segment.rank, tensor.file))
                self._ranges.append(
                    Copy(
                        path,
                        target,
                        nbytes=segment.numel * element,
                        src_offset=segment.src * element,
                        dst_offset=segment.dst * element,
                        truncate=False,
                    )
                )
            else:
                self._to_hash.add((segment.rank, tensor.file))
                values = self.checkpoint.pt_tensor(segment.rank, segment.sub_group, key)
                piece = values[segment.src : segment.src + segment.numel].to(swapper.dtype)
                transfer.write_padded(target, as_bytes(piece), size, offset=segment.dst * element)

    def use_for_memory(self, source: plan.Source, key: str) -> None:
        """Note the files that an in-memory tensor will be read from, so that they are checked now."""
        for segment in source.segments:
            tensor = self.checkpoint.find(segment.rank, segment.sub_group, key)
            self._use(segment.rank, tensor)
            self._to_hash.add((segment.rank, tensor.file))

    def use_file(self, rank: int, relative: str | None) -> None:
        """Note any other file that will be read."""
        if relative is not None:
            self._to_hash.add((rank, relative))

    def stage_param_file(self, rank: int, relative: str, public: Path) -> None:
        """A frozen parameter's partition, file to file."""
        self._whole.append(
            (
                Copy(self.checkpoint.path(rank, relative), self.staged.add(public, self.load_id)),
                rank,
                relative,
            )
        )

    def _use(self, rank: int, tensor: TensorRecord) -> Path:
        """The path of a tensor's file; at least as long as the record says."""
        path = self.checkpoint.path(rank, tensor.file)
        if tensor.where == "swap" and not self.checkpoint.sealed:
            size = seam.current().size(path) if path.is_file() else -1
            if size < tensor.nbytes:
                verify.check_size(path, tensor.nbytes, rank=rank, tag=self.checkpoint.tag)
        return path

    def run(self, *, show: bool) -> None:
        """Copy and hash; sizes were checked when the records were opened."""
        tag = self.checkpoint.tag
        full = self.options.verify == "full" and self.checkpoint.sealed
        found = transfer.run(
            [copy for copy, _, _ in self._whole],
            self.options,
            what=f"resume {tag}",
            sync=False,
            hash=full,
            show=show,
        )
        if full:
            self._compare(found)
        transfer.run(self._ranges, self.options, what=f"resume {tag}", sync=False, hash=False, show=show)

    def _compare(self, found: list[FileSeal]) -> None:
        """Hashes of the whole copies, taken on the way, and of every other file that is read."""
        tag = self.checkpoint.tag
        for (_, rank, relative), seal in zip(self._whole, found, strict=True):
            path = self.checkpoint.path(rank, relative)
            verify.compare(path, self.checkpoint.seals(rank)[relative], seal, rank=rank, tag=tag)
        for rank in sorted({r for r, _ in self._to_hash}):
            seals = self.checkpoint.seals(rank)
            wanted = {name: seals[name] for r, name in sorted(self._to_hash) if r == rank}
            verify.full(self.checkpoint.folder, wanted, self.options, rank=rank, tag=tag)


def clean_leftovers(engine: Any) -> None:
    """Remove staging folders of loads that died (the swap folder belongs to this process alone)."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    folder = None if swapper is None else Path(swapper.swap_folder)
    if folder is not None and folder.is_dir():
        for path in folder.glob(f"{layout.INCOMING_PREFIX}*"):
            seam.current().remove_tree(path)
