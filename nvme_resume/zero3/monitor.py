"""What a save cost, for DeepSpeed's monitors (TensorBoard, wandb, CSV)."""

from __future__ import annotations

from typing import Any


def write(engine: Any, values: dict[str, float]) -> None:
    """Add ``Checkpoint/<name>`` values at the engine's present sample count; nothing where no monitor is on.

    Call on rank 0, from the training's thread (DeepSpeed 0.19.8, ``monitor/monitor.py::MonitorMaster.write_events``).
    """
    monitor = getattr(engine, "monitor", None)
    if monitor is not None and monitor.enabled:
        monitor.write_events([(f"Checkpoint/{k}", v, engine.global_samples) for k, v in values.items()])
