"""What the user asked for, and the DeepSpeed configuration each run gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from nvme_resume import config as options
from nvme_resume.consistency import factory
from nvme_resume.errors import ConfigError

# Values for the "auto" that Hugging Face's Trainer would fill in; other "auto" become DeepSpeed's default.
_AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 3e-3,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_max_lr": 3e-3,
    "scheduler.params.warmup_num_steps": 20,
    "scheduler.params.total_num_steps": 100,
    "bf16.enabled": True,
}


@dataclass(frozen=True)
class Settings:
    """Options of one check; ``validate`` before use."""

    out: Path
    steps: int = 10
    save_at: int | None = None  # None: half way
    ranks: int = 1
    config: Path | None = None  # None: the built-in one
    nvme_path: Path | None = None  # None: inside ``out``
    keep_nvme_path: bool = False
    factory: str = factory.BUILT_IN
    dtype: Literal["bf16", "fp32"] | None = None  # None: as the configuration says
    seed: int = 1
    compare_stock: bool = False
    tolerance: float | None = None  # None: every bit counts
    timeout: float = 900.0
    keep: bool = False

    @property
    def stop(self) -> int:
        """The step after which (b) and (c) are saved and stopped."""
        return self.steps // 2 if self.save_at is None else self.save_at

    def validate(self) -> None:
        """ConfigError for options that cannot work together."""
        if self.steps < 2 or not 1 <= self.stop < self.steps:
            raise ConfigError(
                "the save must lie inside the run",
                expected="1 <= --save-at < --steps",
                found=f"--save-at {self.stop} --steps {self.steps}",
            )
        if self.ranks < 1:
            raise ConfigError("at least one rank is needed", expected=">= 1", found=self.ranks)
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ConfigError("a tolerance is a distance", expected=">= 0", found=self.tolerance)
        if self.keep_nvme_path and self.nvme_path is not None:
            raise ConfigError(
                "--nvme-path and --keep-nvme-path exclude each other", hint="leave one of them out"
            )
        if self.keep_nvme_path and self.config is None:
            raise ConfigError(
                "--keep-nvme-path needs a configuration that names one", hint="add --config PATH"
            )
        if self.out.exists() and any(self.out.iterdir()):
            raise ConfigError(
                "the work folder is not empty", path=str(self.out), hint="name a new one with --out"
            )
        factory.split(self.factory)


def base_config(settings: Settings) -> dict[str, Any]:
    """The configuration that all runs share, before paths: the built-in or the user's, ``auto`` filled in."""
    found: Any
    if settings.config is None:
        found = json.loads(resources.files("nvme_resume.consistency").joinpath("default.json").read_text())
    else:
        try:
            found = json.loads(settings.config.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the configuration: {error}", path=str(settings.config)) from None
    zero = found.get("zero_optimization") if isinstance(found, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        raise ConfigError(
            "the check is for ZeRO stage 3",
            path=None if settings.config is None else str(settings.config),
            expected='"zero_optimization": {"stage": 3, ...}',
            hint="give the configuration of the run that you want to resume",
        )
    if "optimizer" not in found:
        raise ConfigError(
            'the configuration has no "optimizer"',
            path=str(settings.config),
            hint='add the one your training builds, for example "optimizer": {"type": "AdamW", "params": {}}',
        )
    _fill_auto(found, "")
    # One of the three sizes follows from the others, and --ranks need not be the number the user trains on.
    if "train_micro_batch_size_per_gpu" in found:
        found.pop("train_batch_size", None)
    if settings.dtype is not None:
        found.pop("fp16", None)
        found["bf16"] = {"enabled": settings.dtype == "bf16"}
    base: dict[str, Any] = found
    return base


def run_config(base: dict[str, Any], nvme_path: Path | None, *, extension: bool) -> dict[str, Any]:
    """The configuration of one run.  ``nvme_path`` None keeps what the configuration says."""
    made: dict[str, Any] = json.loads(json.dumps(base))
    given = made.pop(options.KEY, None)
    if extension:
        made[options.KEY] = given if options.parse(given) is not None else True
    if nvme_path is not None:
        for section in _nvme_sections(made):
            section["nvme_path"] = str(nvme_path)
    return made


def _nvme_sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("offload_optimizer", "offload_param"):
        section = config["zero_optimization"].get(name)
        if isinstance(section, dict) and section.get("device") == "nvme":
            yield section


def _fill_auto(section: dict[str, Any], prefix: str) -> None:
    for key in list(section):
        value, name = section[key], f"{prefix}{key}"
        if isinstance(value, dict):
            _fill_auto(value, f"{name}.")
        elif value == "auto" and name in _AUTO:
            section[key] = _AUTO[name]
        elif value == "auto":
            del section[key]
