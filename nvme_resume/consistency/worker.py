"""One rank of one phase: ``python -m nvme_resume.consistency.worker spec.json``.

Started by ``launch`` with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.  Plain DeepSpeed
unless the order says otherwise: runs (a) and (c) never import the extension's engine.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from nvme_resume.consistency import factory
from nvme_resume.consistency.spec import AT_END, AT_SAVE, DIGESTS, DONE, READY, STEP, Spec

_PR_SET_PDEATHSIG = 1


class Worker:
    """The training loop, with a line of JSON for everything that will be compared."""

    def __init__(self, spec: Spec, rank: int, world_size: int, events: TextIO) -> None:
        self.spec, self.rank, self.events = spec, rank, events
        _seed(spec.seed)
        self.workload = factory.load(spec.factory)(rank, world_size, spec.seed)
        self.engine = self._engine()
        self.accumulation = int(self.engine.gradient_accumulation_steps())
        _seed(
            spec.seed * 1_000_003 + rank
        )  # dropout differs between ranks, and from the time before the save
        self._tell(READY)

    def run(self) -> None:
        """Load, train, look, save, as ordered."""
        spec = self.spec
        position = 0 if spec.load is None else self._load(spec.load)
        if spec.digests_loaded:
            self._digests(AT_SAVE, position)
        for step in range(position + 1, spec.last_step + 1):
            self._step(step)
            if step in spec.digests_after:
                self._digests(AT_END if step == max(spec.digests_after) else AT_SAVE, step)
        if spec.save is not None:
            self.engine.save_checkpoint(
                spec.save, tag=f"global_step{spec.last_step}", client_state={"data_position": spec.last_step}
            )
        self._tell(DONE)

    def _engine(self) -> Any:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=self.workload.model,
            model_parameters=factory.optimizer_parameters(self.workload),
            config=self.spec.config,
        )
        if self.spec.extension:
            from nvme_resume import NvmeResumeEngine

            engine = NvmeResumeEngine.wrap(engine)
        return engine

    def _load(self, folder: str) -> int:
        path, client_state = self.engine.load_checkpoint(folder)
        if path is None:
            raise FileNotFoundError(f"nothing was loaded from {folder}")
        return int(client_state["data_position"])

    def _step(self, step: int) -> None:
        from nvme_resume.zero3 import digest

        losses, drawn = [], []
        for batch in itertools.islice(self.workload.batches(step), self.accumulation):
            drawn += [value for _, value in sorted(batch.items()) if torch.is_tensor(value)]
            on_device = {k: v.to(self.engine.device) if torch.is_tensor(v) else v for k, v in batch.items()}
            loss = _loss(self.engine(**on_device))
            losses.append(loss.detach().float().item())
            self.engine.backward(loss)
            self.engine.step()
        if len(losses) != self.accumulation:
            raise ValueError(f"step {step} has {len(losses)} batches, {self.accumulation} are needed")
        self._tell(STEP, step=step, losses=losses, lr=self.engine.get_lr(), data=digest.of_tensor(*drawn))

    def _digests(self, when: str, position: int) -> None:
        from nvme_resume.zero3 import digest

        found = digest.state_digests(self.engine)
        self._tell(DIGESTS, when=when, digests={**found, "data": {"position": str(position)}})

    def _tell(self, event: str, **facts: Any) -> None:
        self.events.write(json.dumps({"event": event, **facts}) + "\n")
        self.events.flush()


def _loss(result: Any) -> torch.Tensor:
    """The loss in whatever a model returned (the cases are listed at ``factory.Workload``)."""
    if isinstance(result, Mapping):
        result = result["loss"]
    elif hasattr(result, "loss"):
        result = result.loss
    elif isinstance(result, (tuple, list)):
        result = result[0]
    if not torch.is_tensor(result):
        raise TypeError(f"no loss in the model's result of type {type(result).__name__}")
    return result


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def main(path: str) -> None:
    """Entry point of the process."""
    # Nobody reads our answer when the driver is gone: go with it, even if it was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Two runs must do the same sums in the same order; on CPUs launch sets the number of threads.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    spec, rank = Spec.read(Path(path)), int(os.environ["RANK"])
    with spec.events(rank).open("w") as events:
        Worker(spec, rank, int(os.environ["WORLD_SIZE"]), events).run()
        # The driver ends us when all ranks are done.  Left to themselves, ranks sometimes abort while gloo's
        # threads are torn down ("terminate called without an active exception"), with all their work done.
        while True:
            signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
