"""The state that DeepSpeedCPUAdam hides: a running product beta^t inside its C++ object.

A fresh object asked for step k computes ``pow(beta, k)``; the one that took k steps multiplied k times in
float32.  The last bits differ and show in fp32 training (DeepSpeed 0.19.8, ``csrc/includes/cpu_adam.h``).
The product cannot be read or set, but it is a function of the calls made: we watch the calls through torch's
own step hooks, keep four numbers, and repeat the calls on one-element tensors when resuming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from nvme_resume.manifest import AdamCounter

_ATTRIBUTE = "_nvme_resume_adam_watch"


class Watch:
    """Mirrors ``Adam_Optimizer::IncrementStep`` for one optimizer object."""

    def __init__(self, optimizer: Any) -> None:
        self.betas = _as_float32(optimizer.defaults["betas"])
        self.anchor = 0
        self.step = 0
        # Steps taken before we were asked to watch: an unbroken run from zero is the common case, and the only
        # one whose product is known.
        steps = [int(s["step"]) for s in optimizer.state.values() if isinstance(s, dict) and "step" in s]
        self.step = max(steps, default=0)
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and param in optimizer.state:
                    self.count(int(optimizer.state[param]["step"]), group["betas"])

    def count(self, step: int, betas: tuple[float, float]) -> None:
        """One ``adam_update`` call with this step and these betas."""
        rounded = _as_float32(betas)
        if rounded != self.betas:
            self.betas, self.anchor = rounded, step
        elif step not in (self.step, self.step + 1):
            self.anchor = step
        self.step = step


def _as_float32(betas: tuple[float, float]) -> tuple[float, float]:
    return float(np.float32(betas[0])), float(np.float32(betas[1]))


def _adams(engine: Any) -> Iterator[tuple[str, Any]]:
    """(role, object) of every DeepSpeedCPUAdam that steps for this engine."""
    inner = getattr(engine.optimizer, "optimizer", None)
    for role, candidate in (("optimizer", inner), ("aux", getattr(inner, "aux_optimizer", None))):
        if isinstance(candidate, DeepSpeedCPUAdam):
            yield role, candidate


def watch(engine: Any) -> None:
    """Start watching the engine's DeepSpeedCPUAdam objects (harmless to repeat)."""
    for _, adam in _adams(engine):
        if not hasattr(adam, _ATTRIBUTE):
            setattr(adam, _ATTRIBUTE, Watch(adam))


def capture(engine: Any) -> tuple[AdamCounter, ...]:
    """The counters of all watched objects."""
    return tuple(
        AdamCounter(role=role, beta1=w.betas[0], beta2=w.betas[1], anchor=w.anchor, step=w.step)
        for role, adam in _adams(engine)
        for w in (getattr(adam, _ATTRIBUTE),)
    )


def unbroken(engine: Any, step: int) -> tuple[AdamCounter, ...]:
    """Counters of a run that counted from zero to ``step`` (for checkpoints that recorded none)."""
    counters = []
    for role, adam in _adams(engine):
        beta1, beta2 = _as_float32(adam.param_groups[0]["betas"])
        counters.append(AdamCounter(role=role, beta1=beta1, beta2=beta2, anchor=0, step=step))
    return tuple(counters)


def restore(engine: Any, counters: tuple[AdamCounter, ...]) -> None:
    """Bring the C++ objects to the recorded state by repeating the calls on one-element tensors.

    About 2 microseconds a step; the learning rate is zero and the tensors are our own, so nothing else moves.
    """
    by_role = {c.role: c for c in counters}
    for role, adam in _adams(engine):
        counter = by_role.get(role)
        if counter is None:
            continue
        param, grad, first, second = (torch.zeros(1, dtype=torch.float32) for _ in range(4))

        def call(
            step: int, beta1: float, beta2: float, adam: Any = adam, t: Any = (param, grad, first, second)
        ) -> None:
            adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *t)

        # Other betas first: whatever the object held, the next call takes the pow() branch at the anchor.
        other = 0.5 if counter.beta1 != 0.5 else 0.25
        call(1, other, other)
        for step in range(counter.anchor, counter.step + 1):
            call(step, counter.beta1, counter.beta2)
        state: Watch = getattr(adam, _ATTRIBUTE)
        state.betas = (counter.beta1, counter.beta2)
        state.anchor, state.step = counter.anchor, counter.step
