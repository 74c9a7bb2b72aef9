"""Bring a live ZeRO-3 engine to the state of a checkpoint: first check and stage, then apply.

``prepare`` may fail and leaves engine, swap folder and checkpoint as they were.  ``adopt`` reads the masters and may
find that one is damaged; ``go_back`` then brings the engine back.  ``apply`` follows only when both went well on every
rank.
Memory above the engine's own: the copier's buffers, and one tensor at a time for state that the engine keeps in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from nvme_resume import compat, logs, plan
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, IncompatibleError
from nvme_resume.manifest import MASTER, Extras, FileSeal, RankRecord
from nvme_resume.storage import seal, transfer, verify
from nvme_resume.storage.background import Background, Gate
from nvme_resume.storage.seal import HeldFolder
from nvme_resume.storage.snapshot import SwapFiles
from nvme_resume.storage.transfer import hash_of
from nvme_resume.zero3 import adam, layout_of, quiesce, rng
from nvme_resume.zero3.capture import GRADIENTS
from nvme_resume.zero3.source import Checkpoint
from nvme_resume.zero3.staging import Stager, as_bytes, swap_file, swaps_to_file

log = logs.logger


@dataclass(frozen=True)
class Wanted:
    """Which parts of a checkpoint the caller asked for (DeepSpeed's own arguments)."""

    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False
    strict: bool = True
    rng: bool = True

    @property
    def weights_only(self) -> bool:
        """No optimizer state: master weights alone."""
        return self.module_only or not self.optimizer_states


class Restore:
    """One load on one rank."""

    def __init__(
        self,
        engine: Any,
        folder: Path,
        options: Options,
        rank: int,
        world_size: int,
        wanted: Wanted,
        files: SwapFiles,
    ) -> None:
        self._start = time.monotonic()
        self.engine = engine
        self.options = options
        self.rank = rank
        self.world_size = world_size
        self.wanted = wanted
        self.checkpoint = Checkpoint(folder, engine)
        # The saved rank whose per-rank state (files, random states) stands for ours.
        self.saved_rank = rank % self.checkpoint.world_size
        self.same_world = self.checkpoint.world_size == world_size
        self.sources: list[plan.Source] = []
        # Decided once: parameters move between memory and NVMe between the two halves.
        self._frozen_staged: set[str] = set()
        self._files = files
        self._stager = Stager(self.checkpoint, options, rank, files)
        self._mark = files.mark()
        self._before: _OptimizerState | None = None
        self._cast: list[int] = []  # sub-groups whose 16-bit weights were overwritten

    def seconds(self) -> float:
        """How long this load has taken so far."""
        return time.monotonic() - self._start

    # ---- first half: look, do not touch ----

    def prepare(self) -> list[dict[str, Any]]:
        """Check records, fit and sizes, plan; what room that takes.  On failure nothing has changed."""
        try:
            self._prepare()
        except BaseException:
            self.discard()
            raise
        return self._stager.needs()

    def stage(self, *, show: bool) -> None:
        """Copy and hash, all but what is hashed later.  On failure nothing has changed."""
        self._stager.run(show=show)

    def _prepare(self) -> None:
        record = self.checkpoint.record(self.saved_rank)
        present = layout_of.describe(self.engine, self.rank, self.world_size)
        compat.check(record, present, weights_only=self.wanted.weights_only, partial_frozen=not record.frozen)
        self._check_model_file()
        if not self.wanted.weights_only:
            self._check_hyperparameters()
        self.sources = plan.recut(
            record.sub_groups,
            self.checkpoint.world_size,
            present.sub_groups,
            self.world_size,
            self.rank,
            weights_only=self.wanted.weights_only,
        )
        self._check_accumulation()
        stager = self._stager
        stager.use_file(self.saved_rank, record.model_file)
        stager.use_file(self.saved_rank, record.optim_file)
        extras = self.checkpoint.extras(self.saved_rank)
        stager.use_file(self.saved_rank, None if extras is None else extras.tensors_file)
        for source in self.sources:
            for key in source.keys:
                if swaps_to_file(self.engine, source.target, key):
                    stager.stage_swapped(self.engine, source, key)
                else:
                    stager.use_for_memory(source, key)
        self._stage_frozen(record)

    def _check_model_file(self) -> None:
        """What DeepSpeed's loader would choke on half-way, found before it starts."""
        model = self.checkpoint.model(self.saved_rank)
        where: dict[str, Any] = {"rank": self.rank, "tag": self.checkpoint.tag}
        if (
            self.wanted.lr_scheduler_states
            and not self.wanted.module_only
            and self.engine.lr_scheduler is not None
            and model.get("lr_scheduler") is None
        ):
            raise IncompatibleError(
                "this engine has a learning-rate scheduler, the checkpoint has none",
                hint="pass load_lr_scheduler_states=False",
                **where,
            )
        if self.wanted.strict:
            saved, present = set(model.get("module") or ()), set(self.engine.module.state_dict())
            if saved != present:
                raise IncompatibleError(
                    f"names in the model's state differ: {sorted(saved ^ present)[0]!r}",
                    expected=f"{len(saved)} names",
                    found=f"{len(present)} names",
                    hint="load into the model that was saved, or pass load_module_strict=False",
                    **where,
                )

    def _check_hyperparameters(self) -> None:
        saved = self.checkpoint.optim(self.saved_rank).param_groups
        present = self.engine.optimizer.optimizer.param_groups
        where: dict[str, Any] = {"rank": self.rank, "tag": self.checkpoint.tag}
        if len(saved) != len(present):
            raise IncompatibleError(
                "the number of parameter groups changed", expected=len(saved), found=len(present), **where
            )
        for index, (old, new) in enumerate(zip(saved, present, strict=True)):
            missing = set(new) - set(old) - {"initial_lr"}
            if missing:
                raise IncompatibleError(
                    f"parameter group {index} has no saved value for {sorted(missing)[0]!r}: another optimizer",
                    expected=sorted(new),
                    found=sorted(old),
                    hint="use the optimizer of the saved run",
                    **where,
                )

    def _check_accumulation(self) -> None:
        extras = self.checkpoint.extras(self.saved_rank)
        if extras is None or extras.accumulation is None or self.wanted.weights_only:
            return
        if not (self.same_world and all(s.whole for s in self.sources)):
            raise IncompatibleError(
                "this checkpoint was saved inside a gradient accumulation window; its gradients fit only the "
                "saved world size and sub-groups",
                rank=self.rank,
                tag=self.checkpoint.tag,
                expected=f"world size {self.checkpoint.world_size}, unchanged sub_group_size",
                found=f"world size {self.world_size}",
                hint="resume with the saved layout, or save after an optimizer step",
            )
        saved = self.checkpoint.extras_tensors(self.saved_rank)[GRADIENTS]
        buffer = self.engine.optimizer.grad_partitions_flat_buffer
        if (saved.dtype, saved.numel()) != (buffer.dtype, buffer.numel()):
            raise IncompatibleError(
                "the accumulated gradients have another dtype or size",
                rank=self.rank,
                tag=self.checkpoint.tag,
                expected=f"{saved.numel()} x {saved.dtype}",
                found=f"{buffer.numel()} x {buffer.dtype}",
                hint='restore the saved "data_types.grad_accum_dtype"',
            )

    def _frozen_pieces(self, name: str, numel: int) -> list[tuple[int, int, int, int]]:
        return plan.overlaps(numel, self.checkpoint.world_size, self.world_size, self.rank)

    def _stage_frozen(self, record: RankRecord) -> None:
        saved = {f.name: f for f in record.frozen}
        for name, param in layout_of.frozen_params(self.engine):
            if name not in saved:
                continue
            for rank, _, _, _ in self._frozen_pieces(name, saved[name].numel):
                source = next(f for f in self.checkpoint.record(rank).frozen if f.name == name)
                if source.file is not None and self._can_replace(param, source.file, source.dtype):
                    self._frozen_staged.add(name)
                    self._stager.stage_param_file(rank, source.file, Path(param.nvme_swapper.get_path(param)))
                else:
                    self._stager.use_file(rank, source.file or self.checkpoint.record(rank).model_file)

    def _can_replace(self, param: Any, file: str, dtype: str) -> bool:
        """Can the saved file of a frozen parameter's partition take the place of its swap file as it is?"""
        if not (self.same_world and self.checkpoint.ours):
            return False
        if param.ds_tensor.status is not PartitionedParamStatus.NOT_AVAILABLE:
            return False
        swapper = param.nvme_swapper
        if dtype != layout_of.dtype_name(swapper.dtype):
            return False
        size = swapper._io_aligned_numel(int(param.ds_tensor.ds_numel)) * swapper.swap_element_size
        return bool(self.checkpoint.record(self.saved_rank).files[file].size == size)

    def discard(self) -> None:
        """Forget what was staged and not adopted."""
        self._stager.discard()

    # ---- second half: touch, and be able to go back ----

    def adopt(self) -> None:
        """Put the staged files in place of the live ones and cast the 16-bit weights from the swapped masters.

        Linked masters are hashed while they pass through memory: CorruptError when one is damaged, and ``go_back`` must
        follow, on every rank.  No collectives here.  The parameters must be partitioned
        (``checkpoint_event_prologue``).
        """
        optimizer = self.engine.optimizer
        quiesce.quiesce(self.engine)
        self._before = _OptimizerState(optimizer)
        if getattr(optimizer, "optimizer_swapper", None) is not None:
            optimizer.optimizer_swapper.purge_state()
        optimizer.optimizer.state.clear()
        for adoption in self._stager.adoptions:
            self._files.adopt(
                adoption.public,
                adoption.path,
                adoption.nbytes,
                shared=adoption.linked,
                rewritten=adoption.rewritten,
            )
        for source in self.sources:
            if swaps_to_file(self.engine, source.target, MASTER):
                self._cast_from_swapped(source.target)

    def go_back(self) -> None:
        """Undo ``adopt``: the old swap files are still there under their public names."""
        if self._before is None:
            return
        self._files.go_back(self._mark)
        self._before.put_back()
        for index in self._cast:
            self._cast_sub_group(index)
        self._before = None

    def unverified(self) -> dict[Path, Callable[[Gate], None]]:
        """Linked files that nobody has hashed yet: public name -> what hashes and compares it."""
        if self.options.verify != "background":
            return {}
        cast = {swap_file(self.engine, index, MASTER) for index in self._cast}
        found: dict[Path, Callable[[Gate], None]] = {}
        for public, (rank, relative) in self._stager.linked.items():
            known = self.checkpoint.seals(rank).get(relative)
            if public not in cast and known is not None:
                # By its private name: the checkpoint's folder may be renamed or removed before the first step.
                found[public] = partial(self._verify, self._files.source(public), known, rank)
        return found

    def _verify(self, path: Path, known: FileSeal, rank: int, gate: Gate) -> None:
        (found,) = transfer.run([transfer.Copy(path)], self.options, what="verify", sync=False, gate=gate)
        try:
            verify.compare(path, known, found, rank=rank, tag=self.checkpoint.tag)
        except CorruptError as error:
            if self.world_size > 1:
                error.hint = f'{error.hint}, or load it with "verify": "full": then a good copy of another node is used'
            raise

    def seal_behind(self, work: Background) -> None:
        """Give the hashes to a checkpoint whose saver died, or went on, before they were written."""
        checkpoint = self.checkpoint
        for saved in range(self.rank, checkpoint.world_size, self.world_size):
            if saved in checkpoint.opened() and not checkpoint.sealed(saved):
                opened = HeldFolder(checkpoint.folder)
                work.submit(
                    f"hashes of checkpoint {checkpoint.tag}",
                    partial(seal.add_if_possible, opened, checkpoint.record(saved), self.options, work.gate),
                    self.options.exit_seconds,
                )

    def remark(self) -> str:
        """What a user should know about the checkpoint that was loaded."""
        if not self.checkpoint.ours:
            return " (written by plain DeepSpeed: no hashes to check)"
        if not self.checkpoint.sealed(self.saved_rank):
            return " (it had no hashes yet: sizes and times were checked; the hashes are being added)"
        return ""

    def apply(self) -> None:
        """Restore everything else but what DeepSpeed's own loader restores (module buffers, scheduler, counters).

        No collectives here.
        """
        optimizer = self.engine.optimizer
        self._files.settle(self._mark)
        self._stager.adoptions.clear()
        for source in self.sources:
            if not swaps_to_file(self.engine, source.target, MASTER):
                self._fill(optimizer.fp32_partitioned_groups_flat[source.target].data, source, MASTER)
                optimizer._reassign_or_swap_out_partitioned_parameters(source.target)
        self._restore_frozen()
        if self.wanted.weights_only:
            return
        for source in self.sources:
            self._restore_states(source)
        self._restore_hyperparameters()
        extras = self.checkpoint.extras(self.saved_rank)
        self._restore_window(extras)
        if extras is not None:
            self.engine.micro_steps = extras.micro_steps
        adam.restore(self.engine, self._adam_counters(extras))

    def restore_rng(self) -> None:
        """Random states; a rank that did not exist when the checkpoint was saved keeps its own."""
        if not self.wanted.rng or self.wanted.module_only:
            return
        if self.rank >= self.checkpoint.world_size:
            log.warning("rank %d was not part of the saved run: its random state is new", self.rank)
            return
        restore_rng_of(self.checkpoint, self.saved_rank)

    def _cast_from_swapped(self, index: int) -> None:
        """The 16-bit weights of one sub-group, by DeepSpeed's own cast, from a master that is what was saved."""
        public = swap_file(self.engine, index, MASTER)
        linked = self._stager.linked.get(public)
        known = None if linked is None else self.checkpoint.seals(linked[0]).get(linked[1])
        if known is None or linked is None or self.options.verify in ("structure", "sampled"):
            self._cast_sub_group(index)
            self._cast.append(index)
            return
        rank, relative = linked

        def check(content: memoryview) -> None:
            path = self.checkpoint.path(rank, relative)
            verify.compare(path, known, hash_of(content), rank=rank, tag=self.checkpoint.tag)

        self._cast_sub_group(index, check)
        self._cast.append(index)

    def _cast_sub_group(self, index: int, check: Callable[[memoryview], None] | None = None) -> None:
        optimizer = self.engine.optimizer
        optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            if check is not None:
                master = optimizer.fp32_partitioned_groups_flat[index]
                info = optimizer.optimizer_swapper.swap_params_info[master.ds_id]
                check(as_bytes(info.tensors[0].swap_tensor))
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        finally:
            optimizer._release_swap_buffers(index)

    def _fill(self, target: torch.Tensor, source: plan.Source, key: str) -> None:
        """Read a flat tensor that this engine keeps in memory."""
        element = target.element_size()
        flat = target.view(-1)
        for segment in source.segments:
            into = flat[segment.dst : segment.dst + segment.numel]
            tensor = self.checkpoint.find(segment.rank, segment.sub_group, key)
            if tensor.where == "swap":
                piece = torch.empty(segment.numel, dtype=layout_of.dtype_of(tensor.dtype))
                path = self.checkpoint.path(segment.rank, tensor.file)
                transfer.read_range(path, segment.src * element, as_bytes(piece))
            else:
                values = self.checkpoint.pt_tensor(segment.rank, segment.sub_group, key)
                piece = values[segment.src : segment.src + segment.numel]
            into.copy_(piece)

    def _restore_states(self, source: plan.Source) -> None:
        """Optimizer state of one sub-group: tensors in memory, swapped tensors by reference, plain values."""
        optimizer = self.engine.optimizer
        index = source.target
        master = optimizer.fp32_partitioned_groups_flat[index]
        numel = int(optimizer.fp16_partitioned_groups_flat_numel[index])
        state: dict[str, Any] = dict(source.scalars)
        swapped = []
        for tensor in source.template.tensors:
            if tensor.key == MASTER:
                continue
            if not tensor.flat:
                rank = self.saved_rank if source.whole else 0
                value = self.checkpoint.pt_tensor(rank, source.template.index, tensor.key).clone()
            elif swaps_to_file(self.engine, index, tensor.key):
                # As after a step: an empty tensor whose ds_id names the swap file (optimizer_utils.py).
                value = torch.empty(0, dtype=master.dtype)
                value.ds_id = f"{tensor.key}-{master.ds_id}"  # type: ignore[attr-defined]
                swapped.append(value)
            else:
                value = torch.zeros(numel, dtype=layout_of.dtype_of(tensor.dtype), device=master.device)
                self._fill(value, source, tensor.key)
                self._keep_muon_buffer(index, tensor.key, value, master)
            state[tensor.key] = value
        if state:
            optimizer.optimizer.state[master] = state
        if swapped:
            optimizer.optimizer_swapper.swap_params_info[master.ds_id].add_state_tensors(swapped)

    def _keep_muon_buffer(self, index: int, key: str, value: Any, master: Any) -> None:
        """Muon's in-memory momentum has a second home beside the optimizer's state (``stage3.py``)."""
        optimizer = self.engine.optimizer
        if key == "momentum_buffer" and optimizer.use_muon and optimizer.save_muon_momentum_buffer_in_memory:
            value.swappable = False
            value.ds_id = master.ds_id
            optimizer.muon_momentum_buffer_partitioned_groups_flat[index] = value

    def _restore_hyperparameters(self) -> None:
        optimizer = self.engine.optimizer
        saved = self.checkpoint.optim(self.saved_rank)
        for group, values in zip(optimizer.optimizer.param_groups, saved.param_groups, strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})
        optimizer.overflow = saved.overflow
        if type(saved.loss_scaler) is type(optimizer.loss_scaler):
            optimizer.loss_scaler.__dict__.update(saved.loss_scaler.__dict__)
            optimizer.dynamic_loss_scale = saved.dynamic_loss_scale

    def _restore_window(self, extras: Extras | None) -> None:
        optimizer = self.engine.optimizer
        optimizer.micro_step_id = 0
        optimizer._epilogue_ran_this_backward = False
        optimizer._offload_boundary_param_ids = set()
        if extras is None:
            return
        if extras.grad_scaler is not None and optimizer.torch_autocast_gradscaler is not None:
            optimizer.torch_autocast_gradscaler.load_state_dict(dict(extras.grad_scaler))
        window = extras.accumulation
        if window is None:
            return
        gradients = self.checkpoint.extras_tensors(self.saved_rank)[GRADIENTS]
        optimizer.grad_partitions_flat_buffer.copy_(gradients)
        optimizer.micro_step_id = window.micro_step_id
        optimizer._epilogue_ran_this_backward = window.epilogue_ran
        ids = {name: param.ds_id for param, name in self.engine.param_names.items()}
        optimizer._offload_boundary_param_ids = {ids[name] for name in window.active_params}
        if not optimizer.offload_optimizer:
            optimizer.independent_gradient_partition_epilogue()

    def _adam_counters(self, extras: Extras | None) -> tuple[Any, ...]:
        if extras is not None:
            return extras.adam
        steps = [step for s in self.sources if isinstance(step := s.scalars.get("step"), int)]
        return adam.unbroken(self.engine, max(steps)) if steps else ()

    def _restore_frozen(self) -> None:
        saved = {f.name: f for f in self.checkpoint.record(self.saved_rank).frozen}
        for name, param in layout_of.frozen_params(self.engine):
            if name not in saved or not saved[name].numel:
                continue
            if name in self._frozen_staged:
                continue  # its swap file has been replaced already
            fragment = param.ds_tensor
            flat = torch.zeros(int(fragment.ds_numel), dtype=layout_of.dtype_of(saved[name].dtype))
            for rank, src, dst, numel in self._frozen_pieces(name, saved[name].numel):
                source = next(f for f in self.checkpoint.record(rank).frozen if f.name == name)
                if source.file is None:
                    flat[dst : dst + numel] = self.checkpoint.frozen_fragment(rank, name)[src : src + numel]
                else:
                    path = self.checkpoint.path(rank, source.file)
                    offset = src * flat.element_size()
                    transfer.read_range(path, offset, as_bytes(flat[dst : dst + numel]))
            if fragment.status is PartitionedParamStatus.NOT_AVAILABLE:
                swapper = param.nvme_swapper
                size = swapper._io_aligned_numel(flat.numel()) * swapper.swap_element_size
                public = Path(swapper.get_path(param))
                transfer.write_padded(public, as_bytes(flat.to(swapper.dtype)), size)
                self._files.replaced(public)
            else:
                fragment.data.copy_(flat.view(fragment.shape))


class _OptimizerState:
    """What ``adopt`` takes from the optimizer, to be put back if it must."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._state = dict(optimizer.optimizer.state)
        swapper = getattr(optimizer, "optimizer_swapper", None)
        self._infos = [] if swapper is None else list(swapper.swap_params_info.values())
        self._tensors = [(list(i.tensors), i.has_state_tensors, i.unswapped_gradients) for i in self._infos]

    def put_back(self) -> None:
        self._optimizer.optimizer.state.clear()
        self._optimizer.optimizer.state.update(self._state)
        for info, (tensors, has_states, gradients) in zip(self._infos, self._tensors, strict=True):
            info.tensors, info.has_state_tensors, info.unswapped_gradients = tensors, has_states, gradients


def restore_rng_of(checkpoint: Checkpoint, saved_rank: int) -> None:
    """Set this process's random states to those of a saved rank, saying so when there are none."""
    extras = checkpoint.extras(saved_rank)
    if extras is None or extras.python_rng is None or extras.numpy_rng is None:
        log.warning(
            "checkpoint %s holds no random states (%s): dropout and shuffling will differ from the saved run",
            checkpoint.tag,
            "written by plain DeepSpeed" if extras is None else '"rng": false when it was saved',
        )
        return
    rng.restore(extras.python_rng, extras.numpy_rng, checkpoint.extras_tensors(saved_rank))
