"""A DeepSpeed configuration: is nvme_resume active for it, and what does it swap where?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvme_resume import config
from nvme_resume.doctor.finding import Finding
from nvme_resume.errors import ConfigError


def read(path: Path) -> dict[str, Any]:
    """The configuration in a JSON file.  ConfigError where it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("not a DeepSpeed configuration", path=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise ConfigError(
            "not a DeepSpeed configuration", path=str(path), expected="an object", found=type(value)
        )
    return value


def findings(settings: dict[str, Any]) -> Iterator[Finding]:
    """What the configuration means for nvme_resume."""
    try:
        options = config.parse(settings.get(config.KEY))
    except ConfigError as error:
        yield Finding(f'"{config.KEY}"', str(error), "bad", error.hint)
        return
    zero = settings.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    swapped = config.nvme_offloads(settings)
    if options is None:
        yield Finding(
            f'"{config.KEY}"',
            "not active for this configuration"
            + (", whose swapped state plain DeepSpeed loses" if swapped else ""),
            "bad" if swapped else "note",
            f'write "{config.KEY}": true',
        )
        return
    changed = options.model_dump(exclude_defaults=True, by_alias=True)
    yield Finding(f'"{config.KEY}"', f"active{f' with {changed}' if changed else ''}")
    if stage != 3 and swapped:
        yield Finding(
            "ZeRO stage", f"{stage}: DeepSpeed swaps to NVMe with stage 3 only", "bad", 'set "stage": 3'
        )
    for key, offload in swapped.items():
        path = offload.get("nvme_path")
        if not path:
            yield Finding(key, 'device "nvme" without "nvme_path"', "bad", f'set "{key}.nvme_path"')
        else:
            yield Finding(key, f"swaps to {path}")
    if not swapped:
        yield Finding("offload", "nothing is swapped to NVMe; saves are DeepSpeed's own", "note")
