"""Random training, saving, loading and poking in one process; run as ``python -m tests.fuzz CASE.json``.

The same seed must give the same losses and states whatever way swap files get into checkpoints, and no byte of a
committed checkpoint may ever change.

Writes ``{"log": [...], "changed": [...], "final": digests}`` to the case's ``out``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from tests import training

OPERATIONS = [
    *["train"] * 3,
    *["save"] * 3,
    "load",
    "weights",
    "module",
    "remove",
    "set",
    "moment",
    "wait",
    "bad",
]


class Fuzz:
    """One engine and its checkpoints."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.engine = training.make_engine(case)
        self.random = random.Random(case["fuzz_seed"])
        self.folder = Path(case["checkpoints"])
        self.tags: list[str] = []
        self.hashes: dict[str, dict[str, str]] = {}
        self.position = 0
        self.log: list[Any] = []
        self.changed: list[str] = []

    def run(self, steps: int) -> None:
        """``steps`` operations drawn at random; the state is compared now and then."""
        for number in range(steps):
            name = self.random.choice(OPERATIONS)
            tag = self.random.choice(self.tags) if self.tags else None
            draw, count = self.random.random(), self.random.randrange(1, 4)
            if name in ("train", "save", "wait"):
                getattr(self, name)(number, tag, draw, count)
            elif tag is not None:
                getattr(self, name)(tag, draw)
            self.log.append([number, name])
            if self.random.random() < 0.3:
                self.compare()
        self.compare()

    def train(self, _number: int, _tag: str | None, _draw: float, count: int) -> None:
        self.log.append(training.train(self.case, self.engine, 0, self.position, self.position + count))
        self.position += count

    def save(self, number: int, tag: str | None, draw: float, _count: int) -> None:
        name = tag if tag is not None and draw > 0.8 else f"s{number}"
        before = training.digests(self.engine)
        self.engine.save_checkpoint(str(self.folder), tag=name)
        assert training.digests(self.engine) == before, "a save changed the state"
        if draw < 0.3:
            self.engine.wait_for_checkpoint()
        self.hashes.pop(name, None)
        if name not in self.tags:
            self.tags.append(name)

    def wait(self, *_: Any) -> None:
        self.engine.wait_for_checkpoint()

    def load(self, tag: str, _draw: float, **arguments: Any) -> None:
        self.engine.load_checkpoint(str(self.folder), tag=tag, **arguments)
        self.log.append(training.digests(self.engine))

    def weights(self, tag: str, draw: float) -> None:
        self.load(tag, draw, load_optimizer_states=False)

    def module(self, tag: str, draw: float) -> None:
        self.load(tag, draw, load_module_only=True)

    def remove(self, tag: str, draw: float) -> None:
        """Half of the time while its hashes are being taken."""
        if draw < 0.5 or self.case["nvme_checkpoint"] is not True:
            self.engine.wait_for_checkpoint()
        shutil.rmtree(self.folder / tag)
        self.tags.remove(tag)
        self.hashes.pop(tag, None)

    def _parameter(self, draw: float) -> Any:
        trainable = [p for p in self.engine.module.parameters() if p.requires_grad]
        return trainable[int(draw * len(trainable))]

    def set(self, _tag: str, draw: float) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        if not self.case["pipelined"]:  # plain DeepSpeed 0.19.8 does not survive it there
            parameter = self._parameter(draw)
            safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 1.01)

    def moment(self, _tag: str, draw: float) -> None:
        from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

        if not self.case["pipelined"] and self.engine.optimizer.optimizer.state:
            parameter = self._parameter(draw)
            value = safe_get_full_optimizer_state(parameter, "exp_avg")
            if value is not None:
                safe_set_full_optimizer_state(parameter, value * 0.9, "exp_avg")

    def bad(self, tag: str, _draw: float) -> None:
        """A load of a checkpoint with a damaged master: refused, nothing changed."""
        from nvme_resume import NvmeResumeError

        self.engine.wait_for_checkpoint()
        damaged = self.folder.with_name("damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(self.folder / tag, damaged / tag)
        path = sorted((damaged / tag / "offloaded_tensors" / "rank00").glob("[0-9]*.swp"))[-1]
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\x7f" * 9)
        before = training.digests(self.engine)
        try:
            self.engine.load_checkpoint(str(damaged), tag=tag)
        except NvmeResumeError as error:
            self.log.append(type(error).__name__)
        assert training.digests(self.engine) == before, "a refused load changed the state"

    def compare(self) -> None:
        """Every file of every checkpoint against what it was when first seen; seals may still appear."""
        self.engine.wait_for_checkpoint()
        for tag in self.tags:
            found = {
                str(p.relative_to(self.folder)): xxhash.xxh3_64_hexdigest(p.read_bytes())
                for p in sorted((self.folder / tag).rglob("*"))
                if p.is_file() and not p.name.endswith("seal.json")
            }
            if self.hashes.setdefault(tag, found) != found:
                self.changed.append(tag)


def main(path: str) -> None:
    case = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(1)
    fuzz = Fuzz(case)
    start = time.monotonic()
    fuzz.run(case["steps"])
    result = {"log": fuzz.log, "changed": fuzz.changed, "final": training.digests(fuzz.engine)}
    result["private"] = len(list(Path(case["nvme_path"]).glob("zero_stage_3/nvme_resume/*/*.swp")))
    result["seconds"] = time.monotonic() - start
    result["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
    Path(case["out"]).write_text(json.dumps(result))
    with contextlib.suppress(Exception):
        fuzz.engine.destroy()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
