"""Looking at the state must not change the run, and the look must see what there is to see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvme_resume.consistency import launch
from nvme_resume.consistency.settings import Settings, base_config, run_config
from nvme_resume.consistency.spec import DIGESTS, STEP, Spec

STEPS = 3
OFFLOADS: dict[str, dict[str, Any]] = {
    "pipelined": {"offload_optimizer": {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}},
    "params on nvme": {
        "offload_param": {"device": "nvme", "nvme_path": "", "buffer_count": 12, "buffer_size": 600_000},
    },
}


def train(folder: Path, config: dict[str, Any], digests_after: tuple[int, ...]) -> list[dict[str, Any]]:
    folder.mkdir()
    order = Spec(
        folder=str(folder),
        factory="tests.consistency.workloads:build",
        config=run_config(config, folder / "swap", extension=False),
        seed=1,
        last_step=STEPS,
        digests_after=digests_after,
    )
    [events] = launch.run(order, 1, timeout=300)
    return events


@pytest.mark.parametrize("offload", OFFLOADS)
def test_digests_leave_the_run_alone_and_see_it_move(
    tmp_path: Path, offload: str, repository_on_path: None
) -> None:
    config = json.loads(json.dumps(base_config(Settings(out=tmp_path))))
    for section, values in OFFLOADS[offload].items():
        config["zero_optimization"].setdefault(section, {}).update(values)

    watched = train(tmp_path / "watched", config, (1, 2, STEPS))
    alone = train(tmp_path / "alone", config, (STEPS,))

    assert [e for e in watched if e["event"] == STEP] == [e for e in alone if e["event"] == STEP]
    first, second, last = (e["digests"] for e in watched if e["event"] == DIGESTS)
    assert [e["digests"] for e in alone if e["event"] == DIGESTS] == [last]
    swapped = list((tmp_path / "alone" / "swap").rglob("*.swp"))
    assert any("exp_avg_sq" in path.name for path in swapped)
    assert (offload == "params on nvme") == any("_param" in path.name for path in swapped)
    for kind in ("master", "exp_avg", "exp_avg_sq", "param16", "buffer"):
        same = [place for place in first[kind] if first[kind][place] == second[kind][place]]
        assert first[kind] and not same, f"{kind} of {same} did not move between two steps"
    assert [d["step"]["sub-group 0"] for d in (first, second, last)] == ["1", "2", "3"]
    assert first["rng"]["torch"] != second["rng"]["torch"]
    assert first["hyper"] == second["hyper"] and first["lr"] != second["lr"]
