"""What the check trains: the protocol for a model of your own, given as ``--factory module:function``.

    def function(rank: int, world_size: int, seed: int) -> Workload

``seed`` is for the initial weights only.  The resumed run gets ANOTHER one, so that weights which were not
restored cannot pass for restored ones; data must therefore not depend on it.  All ranks must build the same
model.  ``tiny_llama`` is the built-in workload, made through the same protocol.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from nvme_resume.errors import ConfigError

if TYPE_CHECKING:
    import torch

BUILT_IN = "nvme_resume.consistency.tiny_llama:build"


class Workload(Protocol):
    """What a factory returns.

    May also have ``optimizer_groups`` (a list of parameter groups) or ``parameters`` (parameters, or a
    function that returns them) for the optimizer; without either, all of the model's trainable parameters are
    taken.

    The model is called with one batch as keyword arguments; the loss is its result, the result's ``loss`` or
    ``["loss"]``, or the first of a tuple.
    """

    model: torch.nn.Module

    def batches(self, step: int) -> Iterator[dict[str, Any]]:
        """The micro batches of optimizer step ``step`` (from 1) on this rank.

        A function of ``step`` alone, whatever was drawn before: this is how a resumed run finds its place.
        One batch is drawn for each gradient accumulation step, never more.
        """
        ...


class Factory(Protocol):
    """Builds the workload of one rank."""

    def __call__(self, rank: int, world_size: int, seed: int) -> Workload: ...


def split(name: str) -> tuple[str, str]:
    """``("module", "function")`` of ``module:function``."""
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ConfigError(
            "not a factory",
            expected="module:function",
            found=name,
            hint="for example --factory my_project.check:build",
        )
    return module, function


def load(name: str) -> Factory:
    """Import ``module:function``; the current folder is on the path."""
    module, function = split(name)
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory


def optimizer_parameters(workload: Workload) -> list[Any]:
    """What the optimizer is to own: parameter groups or parameters."""
    groups: Iterable[Any] | None = getattr(workload, "optimizer_groups", None)
    if groups is not None:
        return list(groups)
    given = getattr(workload, "parameters", None)
    if given is not None:
        return list(given() if callable(given) else given)
    return [p for p in workload.model.parameters() if p.requires_grad]
