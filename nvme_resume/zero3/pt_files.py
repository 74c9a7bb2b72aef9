"""DeepSpeed's own ``.pt`` files, opened without running code from them.

``weights_only=True`` with the few harmless classes DeepSpeed stores allowed by name; tensors are memory-mapped,
so opening a file of any size costs nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from nvme_resume.errors import CorruptError
from nvme_resume.manifest import MASTER


def _enum_member(kind: Any, name: Any) -> Any:
    """Stands for ``getattr`` in a file: members of DeepSpeed's own enum and nothing else.

    Python 3.11.0 to 3.11.3 pickle an enum member as ``getattr(kind, name)`` (Debian 12 has 3.11.2), others by value.
    """
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise ValueError(f"refused getattr({kind!r}, {name!r})")
    return ZeroStageEnum[name]


_ALLOWED: list[Any] = [
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    (_enum_member, "builtins.getattr"),
    (_enum_member, "__builtin__.getattr"),
]


def load(path: Path, trust: Callable[[], None] | None = None) -> dict[str, Any]:
    """The dictionary in a ``.pt`` file of DeepSpeed.

    A file with other objects in it (a ``client_state`` of the user's) can only be unpickled, which runs code from it:
    ``trust`` is asked first and raises if the file is not the one that was saved.  Raises CorruptError when the file
    is damaged, or holds such objects and there is no ``trust``.
    """
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise CorruptError(
            "not a regular file", path=str(path), hint="load an older tag of the same folder by its name"
        )
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        if trust is None:
            raise _unreadable(path, error) from error
        trust()
        content = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except FileNotFoundError:
        raise CorruptError(
            "file of the checkpoint is missing", path=str(path), hint="load an older tag"
        ) from None
    except Exception as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise CorruptError("not a checkpoint file of DeepSpeed", path=str(path))
    return content


def _unreadable(path: Path, error: Exception) -> CorruptError:
    reason = str(error).splitlines()
    return CorruptError(
        f"cannot be read safely: {next((r for r in reason if 'Unpickler error' in r), reason[0]).strip()}",
        path=str(path),
        hint="load an older tag of the same folder by its name",
    )


class OptimFile:
    """One rank's ``*_optim_states.pt``."""

    def __init__(self, path: Path, trust: Callable[[], None] | None = None) -> None:
        self.path = path
        content = load(path, trust)
        try:
            self.content: dict[str, Any] = content[OPTIMIZER_STATE_DICT]
            self.ds_config: dict[str, Any] = content.get("ds_config") or {}
            base = self.content[OPTIMIZER_STATE_DICT]
            self.states: dict[int, dict[str, Any]] = base["state"]
            self.param_groups: list[dict[str, Any]] = base["param_groups"]
            self.masters: list[torch.Tensor] = self.content[FP32_FLAT_GROUPS]
            self.loss_scaler: Any = self.content[LOSS_SCALER]
            self.overflow = bool(self.content["overflow"])
            self.dynamic_loss_scale = bool(self.content["dynamic_loss_scale"])
        except (KeyError, TypeError) as error:
            raise CorruptError(f"not an optimizer file of ZeRO-3: {error}", path=str(path)) from error

    def tensor(self, sub_group: int, state_index: int, key: str) -> torch.Tensor:
        """A flat tensor kept in this file (CPU, memory-mapped)."""
        if key == MASTER:
            return self.masters[sub_group].detach()
        value = self.states.get(state_index, {}).get(key)
        if not isinstance(value, torch.Tensor):
            raise CorruptError(f"no tensor {key!r} for sub-group {sub_group}", path=str(self.path))
        return value.detach()
