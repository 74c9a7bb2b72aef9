"""DeepSpeed's own loader, used for what it does right: module buffers, scheduler, counters, client state.

It runs with two of its pieces replaced on the engine's subclass while one of our loads is active: frozen
parameters are ours (its copy breaks on NVMe placeholders and on another world size), and a rank that did not
exist when the checkpoint was saved reads the model file of one that did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS

from nvme_resume.errors import PeerError
from nvme_resume.zero3.restore import Wanted

_ACTIVE = "_nvme_resume_saved_rank"


class StockOverrides:
    """Mixed in front of the engine's class; unless a load of ours runs, the methods do what DeepSpeed's do."""

    def load_module_state_dict(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """``engine.py::load_module_state_dict`` without frozen parameter fragments."""
        if getattr(self, _ACTIVE, None) is not None:
            checkpoint = {k: v for k, v in checkpoint.items() if k != FROZEN_PARAM_FRAGMENTS}
        return super().load_module_state_dict(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _copy_recovery_script(self, save_path: str) -> None:
        """``engine.py::_copy_recovery_script``, once for each save folder: training waits for it."""
        if not (Path(save_path) / "zero_to_fp32.py").exists():
            super()._copy_recovery_script(save_path)  # type: ignore[misc]

    def _get_ckpt_name(
        self, checkpoints_path: Any, tag: Any, mp_placeholder: Any = None, pp_placeholder: Any = None
    ) -> Any:
        saved_rank = getattr(self, _ACTIVE, None)
        if saved_rank is not None and pp_placeholder is None:
            pp_placeholder = str(saved_rank)
        return super()._get_ckpt_name(checkpoints_path, tag, mp_placeholder, pp_placeholder)  # type: ignore[misc]


@contextlib.contextmanager
def _active(engine: Any, saved_rank: int) -> Iterator[None]:
    engine.__dict__[_ACTIVE] = saved_rank
    # load_module_only ends in refresh_fp32_params, which breaks on swapped masters ("size of tensor a (0)").
    engine.optimizer.refresh_fp32_params = lambda: None
    try:
        yield
    finally:
        del engine.__dict__[_ACTIVE]
        del engine.optimizer.refresh_fp32_params


def load(engine: Any, folder: Path, saved_rank: int, wanted: Wanted, custom_load_fn: Any) -> tuple[Any, Any]:
    """(load path, client state) as ``engine.load_checkpoint`` returns them.  No collectives."""
    with _active(engine, saved_rank):
        path, client_state = engine._load_checkpoint(
            str(folder.parent),
            folder.name,
            load_module_strict=wanted.strict,
            # True also when only weights are wanted: False would gather a full fp32 model in memory first.
            load_optimizer_states=True,
            load_lr_scheduler_states=wanted.lr_scheduler_states,
            load_module_only=wanted.module_only,
            custom_load_fn=custom_load_fn,
        )
    return path, client_state


def before(engine: Any) -> None:
    """Partition all parameters (``checkpoint_event_prologue``).  Collective-free on ZeRO-3."""
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()


def after(engine: Any) -> None:
    """Gather persistent parameters again.  Collective: all ranks or none; PeerError when a rank has died meanwhile."""
    if not engine._optimizer_has_ckpt_event_epilogue():
        return
    try:
        engine.optimizer.checkpoint_event_epilogue()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # all that gloo says; DeepSpeed's group, so its timeout holds, not ours
        raise PeerError(
            f"the ranks could not gather their persistent parameters: {error}",
            hint="look at the logs of the other ranks; a rank that died takes the job with it",
        ) from error
