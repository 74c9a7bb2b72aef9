"""The check's judgement: distances, verdicts, reports, configurations, and what it says when a rank dies."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nvme_resume.cli import app
from nvme_resume.consistency import compare, factory, launch, plot, settings
from nvme_resume.consistency.compare import Run, ulp_distance
from nvme_resume.consistency.report import Report
from nvme_resume.consistency.settings import Settings
from nvme_resume.consistency.spec import AT_END, AT_SAVE, Spec
from nvme_resume.errors import ConfigError, PeerError

STEPS, SAVE_AT, RANKS = 4, 2, 2


def float32(bits: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(value)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (1.0, 1.0, 0),
        (1.0, float32(0x3F800001), 1),
        (float32(0x3F800001), 1.0, -1),
        (-1.0, float32(0xBF800001), -1),
        (0.0, float32(0x00000001), 1),
        (0.0, -0.0, -1),
        (float32(0x80000001), float32(0x00000001), 3),
        (float32(0x7F7FFFFF), math.inf, 1),
        (1.0, 2.0, 1 << 23),
        (math.nan, math.nan, 0),
        (math.nan, 1.0, None),
        (1.0, math.nan, None),
    ],
)
def test_ulp_distance(a: float, b: float, distance: int | None) -> None:
    assert ulp_distance(a, b) == distance


def digests(rank: int) -> dict[str, dict[str, str]]:
    groups = {f"sub-group {i}": f"{rank}{i}" for i in range(3)}
    return {
        "master": dict(groups),
        "param16": {"model.a": f"{rank}a", "model.b": f"{rank}b"},
        "buffer": {"model.seen": "5"},
        "exp_avg": dict(groups),
        "exp_avg_sq": dict(groups),
        "step": {"sub-group 0": "2", "engine.global_steps": "2"},
        "lr": {"group 0": "0.001", "scheduler": "x"},
        "hyper": {"group 0.betas": "[0.9, 0.95]"},
        "loss_scaler": {"cur_scale": "1.0"},
        "rng": {"python": f"{rank}p", "numpy": f"{rank}n", "torch": f"{rank}t"},
        "data": {"position": "2"},
    }


def run_of(name: str) -> Run:
    return Run(
        name,
        losses={s: [[4.0 - s / 8 + rank, 3.0] for rank in range(RANKS)] for s in range(1, STEPS + 1)},
        data={s: [f"{s}{rank}" for rank in range(RANKS)] for s in range(1, STEPS + 1)},
        digests={moment: [digests(rank) for rank in range(RANKS)] for moment in (AT_SAVE, AT_END)},
    )


def judge(run: Run) -> compare.Verdict:
    return compare.compare(run_of("uninterrupted"), run, save_at=SAVE_AT, steps=STEPS)


def test_equal_runs_are_equal() -> None:
    verdict = judge(run_of("same"))
    assert verdict.equal and verdict.within(None) and verdict.explanation() == []
    assert set(verdict.ulp.values()) == {0}
    places = sum(len(p) for p in digests(0).values())
    assert verdict.compared == STEPS * RANKS * 2 + 2 * RANKS * places


@pytest.mark.parametrize("moment", [AT_SAVE, AT_END])
@pytest.mark.parametrize("kind", list(digests(0)))
def test_each_kind_is_found_and_its_first_place_named(kind: str, moment: str) -> None:
    run = run_of("other")
    place = list(digests(1)[kind])[-1]
    run.digests[moment][1][kind][place] = "different"
    verdict = judge(run)
    assert not verdict.equal and not verdict.differing_steps
    [found] = verdict.differences
    assert (found.moment, found.kind, found.rank, found.place) == (moment, kind, 1, place)
    assert (found.differing, found.total) == (1, RANKS * len(digests(0)[kind]))
    assert (found.expected, found.found) == (digests(1)[kind][place], "different")
    [line] = verdict.explanation()
    assert (f"not restored: {found.title}" == line) == (moment == AT_SAVE)


def test_what_is_missing_is_absent_and_differs() -> None:
    run = run_of("other")
    del run.digests[AT_SAVE][0]["exp_avg"]
    del run.digests[AT_END][1]
    verdict = judge(run)
    [found] = verdict.at(AT_SAVE)
    assert (found.kind, found.place, found.found) == ("exp_avg", "sub-group 0", compare.ABSENT)
    assert {d.kind for d in verdict.at(AT_END)} == set(digests(0))
    assert judge(Run("empty")).differing_steps == tuple(range(1, STEPS + 1))


def test_one_loss_of_one_rank_is_enough() -> None:
    run = run_of("other")
    run.losses[4][1][1] = float32(struct.unpack("<I", struct.pack("<f", 3.0))[0] + 1)
    verdict = judge(run)
    assert verdict.differing_steps == (4,) and verdict.ulp[4] == 1
    assert "beta^t" in verdict.explanation()[0]


def test_a_training_that_does_not_repeat_itself_is_not_blamed_on_the_resume() -> None:
    run = run_of("other")
    run.losses[1][0][0] += 1
    assert "before the save" in judge(run).explanation()[0]


def test_another_order_of_data_is_named() -> None:
    run = run_of("other")
    run.data[3][1] = "other"
    verdict = judge(run)
    assert verdict.differing_data == (3,) and "step 3" in verdict.explanation()[0]


def test_tolerance_looks_at_losses_only_and_never_accepts_what_is_no_number() -> None:
    run = run_of("other")
    run.losses[3][0][0] += 0.25
    run.digests[AT_SAVE][0]["rng"]["torch"] = "different"
    assert judge(run).within(0.25) and not judge(run).within(0.2) and not judge(run).within(None)
    run.losses[4][0][0] = math.nan
    verdict = judge(run)
    assert verdict.ulp[4] is None and not verdict.within(1e9)
    del run.losses[4]
    assert not judge(run).within(1e9)


def report_of(b: Run, tolerance: float | None = None) -> Report:
    runs = {"a": run_of("uninterrupted"), "b": b, "c": run_of("plain DeepSpeed")}
    runs["c"].losses[3][0][0] = math.nan
    runs["c"].digests[AT_SAVE][0]["exp_avg"] = {}
    verdicts = {key: judge(runs[key]) for key in "bc"}
    return Report({}, {}, runs, verdicts, SAVE_AT, STEPS, tolerance, {"report": "/somewhere/report.json"})


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    report.show(console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_report_of_equal_runs() -> None:
    report = report_of(run_of("nvme_resume"))
    assert report.exit_code == 0, "plain DeepSpeed's difference does not count"
    text = shown(report)
    assert "(b) nvme_resume: EQUAL to the last bit" in text
    assert "(c) plain DeepSpeed: DIFFERENT" in text and "not restored: optimizer state exp_avg" in text
    assert "3 of 6, first rank 0, sub-group 0: 00 in (a), absent in (c)" in text
    content = json.loads(report.json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["passed"] and content["exact"] and content["exit_code"] == 0
    assert [row["step"] for row in content["steps"]] == [1, 2, 3, 4]
    assert content["steps"][2]["ulp_b"] == 0 and content["steps"][2]["ulp_c"] is None
    assert content["runs"]["a"]["digests"][AT_SAVE][1]["rng"]["torch"] == "1t"
    assert content["verdicts"]["c"]["explanation"]


def test_report_of_different_runs() -> None:
    other = run_of("nvme_resume")
    other.losses[3][0][0] += 0.5
    report = report_of(other)
    assert report.exit_code == 1 and "first differing loss at step 3" in shown(report)


def test_report_with_a_tolerance_says_so() -> None:
    other = run_of("nvme_resume")
    other.losses[3][0][0] += 0.5
    report = report_of(other, tolerance=0.6)
    assert report.exit_code == 0 and not report.content()["exact"]
    assert "NOT AN EXACT CHECK" in shown(report)


def test_curves(tmp_path: Path) -> None:
    report = report_of(run_of("nvme_resume"))
    plot.draw(tmp_path / "losses.png", report.runs, save_at=SAVE_AT, title="title")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


AUTO = {
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "nvme", "nvme_path": "/theirs"},
        "offload_param": {"device": "cpu"},
    },
    "nvme_checkpoint": {"verify": "structure"},
}


def base_of(tmp_path: Path, config: Any, **options: Any) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return settings.base_config(Settings(out=tmp_path / "out", config=path, **options))


def test_users_configuration(tmp_path: Path) -> None:
    base = base_of(tmp_path, AUTO)
    assert "auto" not in json.dumps(base) and base["train_micro_batch_size_per_gpu"] == 2
    ours = settings.run_config(base, tmp_path / "swap", extension=True)
    assert ours["nvme_checkpoint"] == {"verify": "structure"}
    assert ours["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(tmp_path / "swap")
    assert "nvme_path" not in ours["zero_optimization"]["offload_param"]
    stock = settings.run_config(base, None, extension=False)
    assert "nvme_checkpoint" not in stock
    assert stock["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/theirs"
    assert not base_of(tmp_path, AUTO, dtype="fp32")["bf16"]["enabled"]


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        {"zero_optimization": {"stage": 2}, "optimizer": {}},
        {"zero_optimization": True},
        {"zero_optimization": {"stage": 3}},
    ],
)
def test_configurations_that_cannot_be_checked(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ConfigError):
        base_of(tmp_path, config)


def test_built_in_configuration_switches_the_extension_on(tmp_path: Path) -> None:
    base = settings.base_config(Settings(out=tmp_path))
    assert settings.run_config(base, tmp_path, extension=True)["nvme_checkpoint"] is True
    assert "nvme_checkpoint" not in settings.run_config(copy.deepcopy(base), tmp_path, extension=False)


def test_parameters_of_a_workload() -> None:
    class Bare:
        class model:
            @staticmethod
            def parameters() -> list[Any]:
                return [type("P", (), {"requires_grad": flag})() for flag in (True, False)]

    class Listed(Bare):
        parameters = ("p", "q")

    class Called(Bare):
        def parameters(self) -> Any:
            return iter("pq")

    class Grouped(Called):
        optimizer_groups = ({"params": ["p"]},)

    assert len(factory.optimizer_parameters(Bare())) == 1
    assert factory.optimizer_parameters(Listed()) == factory.optimizer_parameters(Called()) == ["p", "q"]
    assert factory.optimizer_parameters(Grouped()) == [{"params": ["p"]}]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "4", "--save-at", "4"],
        ["--save-at", "0"],
        ["--steps", "one"],
        ["--factory", "no_function"],
        ["--tolerance", "-1"],
        ["--keep-nvme-path"],
        ["--config", "missing.json"],
        ["--out", "."],
        ["--dtype", "int8"],
    ],
)
def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()  # --out . is not empty
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 2, result.output
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_help_names_the_exit_codes() -> None:
    for arguments in (["--help"], ["check", "--help"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0 and "Exit codes" in result.output


def order(folder: Path, workload: str) -> Spec:
    return Spec(
        folder=str(folder), factory=f"tests.consistency.workloads:{workload}", config={}, seed=1, last_step=1
    )


def test_a_rank_that_dies_takes_the_others_with_it(tmp_path: Path, repository_on_path: None) -> None:
    begun = time.monotonic()
    with pytest.raises(launch.WorkerError) as caught:
        launch.run(order(tmp_path, "build_dying"), 2, timeout=120)
    assert time.monotonic() - begun < 60
    assert caught.value.rank == 1 and caught.value.exit_code == 1
    assert "SIGKILL" in str(caught.value) and "about to die" in str(caught.value)


def test_silent_ranks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository_on_path: None
) -> None:
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "lock").touch()
    os.utime(tmp_path / "async_io" / "lock", (1, 1))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(PeerError, match="rank 0 and rank 1: nothing heard") as caught:
        launch.run(order(tmp_path, "build_silent"), 2, timeout=2)
    assert str(tmp_path / "async_io" / "lock") in str(caught.value.hint)


def test_end_to_end(tmp_path: Path, repository_on_path: None) -> None:
    """The command as people run it: one rank, six steps, plain DeepSpeed beside."""
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "nvme_resume.consistency",
        "--ranks",
        "1",
        "--steps",
        "6",
        "--compare-stock",
    ]
    done = subprocess.run(
        [*command, "--json", "--out", str(out)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert report["passed"] and report["exact"] and report["verdicts"]["b"]["equal"]
    assert report["verdicts"]["b"]["compared"] > 150
    stock = report["verdicts"]["c"]
    assert not stock["equal"] and stock["differing_steps"] == [4, 5, 6]
    lost = {d["kind"]: d for d in stock["differences"] if d["moment"] == AT_SAVE}
    assert {"master", "param16", "exp_avg", "exp_avg_sq", "step", "rng"} <= set(lost)
    assert lost["exp_avg"]["found"] == "absent" and lost["exp_avg"]["differing"] == lost["exp_avg"]["total"]
    assert (out / "losses.png").stat().st_size > 10_000
    assert sorted(p.name for p in out.iterdir()) == [
        *("a", "b-resume", "b-save", "c-resume", "c-save", "losses.png"),
        "report.json",
    ], "swap files and checkpoints of a passed check are removed"
    assert "\x1b" not in done.stderr, "no colours, no animation where there is no terminal"
