"""First half of a load: check everything and put the swap files under private names, beside the live ones.

Nothing the engine can see is touched here.  On one filesystem a checkpoint's file is linked, not copied; its hash is
taken later, while it is read (masters) or before the first step reads it (moments), unless ``"verify": "full"``.
Copies are hashed on the way.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvme_resume import plan
from nvme_resume.config import Options
from nvme_resume.manifest import MASTER, TensorRecord
from nvme_resume.storage import disk as seam
from nvme_resume.storage import ladder, transfer, verify
from nvme_resume.storage.room import Needs
from nvme_resume.storage.snapshot import SwapFiles
from nvme_resume.storage.transfer import Copy
from nvme_resume.zero3.source import Checkpoint


@dataclass(frozen=True)
class Adoption:
    """A private file that will be read in place of a public one."""

    public: Path
    path: Path
    nbytes: int
    linked: bool  # the checkpoint's own inode; else a copy
    rewritten: bool  # every step writes it anew


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
    """Collects what one rank reads: files to link, files to copy, files to hash; then does it."""

    def __init__(self, checkpoint: Checkpoint, options: Options, rank: int, files: SwapFiles) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.rank = rank
        self.adoptions: list[Adoption] = []
        self.linked: dict[
            Path, tuple[int, str]
        ] = {}  # public name of a linked file -> saved rank, relative name
        self._files = files
        self._whole: list[tuple[Copy, int, str]] = []  # copy, saved rank, relative name
        self._ranges: list[Copy] = []
        self._to_hash: set[tuple[int, str]] = set()

    def stage_swapped(self, engine: Any, source: plan.Source, key: str) -> None:
        """Plan the swap file of one flat tensor of the present engine."""
        swapper = engine.optimizer.optimizer_swapper
        numel = int(engine.optimizer.fp16_partitioned_groups_flat_numel[source.target])
        size = swapper._io_aligned_numel(numel) * swapper.swap_element_size
        public = swap_file(engine, source.target, key)
        if source.whole:
            (only,) = source.segments
            tensor = self.checkpoint.find(only.rank, only.sub_group, key)
            listed = self.checkpoint.record(only.rank).files.get(tensor.file)
            if tensor.where == "swap" and listed is not None and listed.size == size:
                self._stage_whole(
                    only.rank, tensor.file, self._use(only.rank, tensor), public, size, rewritten=True
                )
                return
        target = self._copy_of(public, size)
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

    def _stage_whole(
        self, rank: int, relative: str, path: Path, public: Path, size: int, *, rewritten: bool
    ) -> None:
        """A file that can take the place of a swap file as it is: linked where that is possible, else copied."""
        if self.options.method in ("auto", "link"):
            private = self._files.folder(public.parent).name(public)
            try:
                seam.current().link(path, private)
            except OSError as error:
                if error.errno not in ladder.STEP_DOWN or self.options.method == "link":
                    raise
            else:
                self.adoptions.append(Adoption(public, private, size, linked=True, rewritten=rewritten))
                self.linked[public] = (rank, relative)
                return
        self._whole.append((Copy(path, self._copy_of(public, size)), rank, relative))

    def _copy_of(self, public: Path, size: int) -> Path:
        path = self._files.folder(public.parent).name(public)
        self.adoptions.append(Adoption(public, path, size, linked=False, rewritten=True))
        return path

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
        size = self.checkpoint.record(rank).files[relative].size
        path = self.checkpoint.path(rank, relative)
        self._stage_whole(rank, relative, path, public, size, rewritten=False)

    def _use(self, rank: int, tensor: TensorRecord) -> Path:
        """The path of a tensor's file; at least as long as the record says."""
        path = self.checkpoint.path(rank, tensor.file)
        if tensor.where == "swap" and not self.checkpoint.ours:
            size = seam.current().size(path) if path.is_file() else -1
            if size < tensor.nbytes:
                verify.check_size(path, tensor.nbytes, rank=rank, tag=self.checkpoint.tag)
        return path

    def run(self, *, show: bool) -> None:
        """Copy, and hash what is not hashed while it is used; sizes were checked when the records were opened."""
        tag, options = self.checkpoint.tag, self.options
        hashed = options.verify in ("background", "full")
        found = transfer.run(
            [copy for copy, _, _ in self._whole],
            options,
            what=f"resume {tag}",
            sync=False,
            hash=hashed,
            show=show,
        )
        if hashed:
            for (_, rank, relative), seal in zip(self._whole, found, strict=True):
                known = self.checkpoint.seals(rank).get(relative)
                if known is not None:
                    path = self.checkpoint.path(rank, relative)
                    verify.compare(path, known, seal, rank=rank, tag=tag)
        if options.verify in ("full", "sampled"):
            self._to_hash |= set(self.linked.values())
        if options.verify == "sampled":
            self._to_hash |= {(rank, relative) for _, rank, relative in self._whole}
        if options.verify != "structure":
            for rank in sorted({r for r, _ in self._to_hash}):
                self.checkpoint.check_hashes(rank, sorted(n for r, n in self._to_hash if r == rank), options)
        transfer.run(self._ranges, options, what=f"resume {tag}", sync=False, hash=False, show=show)

    def needs(self) -> list[dict[str, Any]]:
        """Room for copies, and for fresh files that the training will write beside linked ones."""
        found = Needs(socket.gethostname())
        for adoption in self.adoptions:
            present = seam.current().size(adoption.public) if adoption.public.is_file() else 0
            if not adoption.linked:
                found.add(adoption.public.parent, adoption.nbytes, 1)
            elif adoption.rewritten:
                found.add(adoption.public.parent, max(0, adoption.nbytes - present), 1)
        return found.plain()

    def discard(self) -> None:
        """Remove what was staged and not adopted."""
        for adoption in self.adoptions:
            seam.current().remove_tree(adoption.path)
        self.adoptions.clear()
