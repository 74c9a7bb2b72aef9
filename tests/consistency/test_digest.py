"""Looking at the state must not change the run, and the look must see what there is to see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvme_resume.consistency import launch
from nvme_resume.consistency.settings import Settings, base_config, run_config
from nvme_resume.consistency.spec import AT_END, AT_SAVE, DIGESTS, STEP, Spec

STEPS, MOMENTS = 3, ("exp_avg", "exp_avg_sq")
OFFLOADS: dict[str, dict[str, Any]] = {
    "pipelined": {"offload_optimizer": {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}},
    "params on nvme": {
        "offload_param": {"device": "nvme", "nvme_path": "", "buffer_count": 12, "buffer_size": 300000},
    },
}


def train(folder: Path, config: dict[str, Any], digests_after: tuple[int, ...]) -> list[dict[str, Any]]:
    folder.mkdir()
    order = Spec(
        folder=str(folder),
        factory=Settings(out=folder).factory,
        config=run_config(config, folder / "swap", extension=False),
        seed=1,
        last_step=STEPS,
        digests_after=digests_after,
    )
    [events] = launch.run(order, 1, timeout=300)
    return events


@pytest.mark.parametrize("offload", OFFLOADS)
def test_digests_leave_the_run_alone(tmp_path: Path, offload: str) -> None:
    config = json.loads(json.dumps(base_config(Settings(out=tmp_path))))
    for section, values in OFFLOADS[offload].items():
        config["zero_optimization"].setdefault(section, {}).update(values)
    # One matrix is large enough for DeepSpeed to swap it; the block size is the threshold.
    config["aio"]["block_size"] = 1 << 18

    watched = train(tmp_path / "watched", config, (1, 2, STEPS))
    alone = train(tmp_path / "alone", config, (STEPS,))

    assert [e for e in watched if e["event"] == STEP] == [e for e in alone if e["event"] == STEP]
    first, second, last = (e["digests"] for e in watched if e["event"] == DIGESTS)
    [(when, unwatched)] = [(e["when"], e["digests"]) for e in alone if e["event"] == DIGESTS]
    assert when == AT_END and last == unwatched
    for kind in ("master", *MOMENTS, "param16"):
        changed = [place for place in first[kind] if first[kind][place] != second[kind][place]]
        assert len(changed) > 1, f"{kind} did not move between two steps"
    assert len(first["master"]) > 3 and first["step"]["sub-group 0"] == "1"
    assert AT_SAVE in [e.get("when") for e in watched]
