"""Random states, loss scaler and CPUAdam's hidden product, each alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

deepspeed = pytest.importorskip("deepspeed")

from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker  # noqa: E402
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: E402
from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: E402

from nvme_resume import plan  # noqa: E402
from nvme_resume.errors import CorruptError  # noqa: E402
from nvme_resume.manifest import Extras, decode, encode  # noqa: E402
from nvme_resume.zero3 import adam, layout_of, pt_files, rng, supported  # noqa: E402


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_random_states_come_back_through_json_and_bytes() -> None:
    random.gauss(0, 1), np.random.randn()  # both keep a spare value
    get_cuda_rng_tracker().reset()
    get_cuda_rng_tracker().add("model-parallel-rng", 1234)
    python, numpy_state, tensors = rng.capture()
    record = Extras(checkpoint_id="x", rank=0, micro_steps=0, python_rng=python, numpy_rng=numpy_state)
    back = decode(Extras, encode(record), "extras")
    assert back.python_rng is not None and back.numpy_rng is not None
    expected = [draw() for _ in range(3)], random.gauss(0, 1), float(np.random.randn())
    tracked = get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
    get_cuda_rng_tracker().reset()
    rng.restore(back.python_rng, back.numpy_rng, tensors)
    assert ([draw() for _ in range(3)], random.gauss(0, 1), float(np.random.randn())) == expected
    assert torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], tracked)
    get_cuda_rng_tracker().reset()


def optimizer_file(path: Path, scaler: object) -> Path:
    inner = {"state": {}, "param_groups": []}
    state = {
        "optimizer_state_dict": inner,
        "fp32_flat_groups": [torch.zeros(0)],
        "loss_scaler": scaler,
        "overflow": True,
        "dynamic_loss_scale": True,
    }
    torch.save({"optimizer_state_dict": state}, path)
    return path


def test_a_dynamic_loss_scaler_is_read_without_running_code(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(
        init_scale=2**16, scale_window=5, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    scaler.__dict__.update(cur_scale=2.0**13, cur_iter=9, last_overflow_iter=7, cur_hysteresis=1)
    found = pt_files.OptimFile(optimizer_file(tmp_path / "o.pt", scaler))
    assert found.overflow
    assert found.loss_scaler.__dict__ == scaler.__dict__


class ByGetattr:
    """Pickles as ``getattr(owner, name)``, as enum members do in Python 3.11.0 to 3.11.3."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.owner, self.name)


def test_enum_members_of_any_python_are_read(tmp_path: Path) -> None:
    torch.save(
        {"stage": ByGetattr(ZeroStageEnum, "weights"), "plain": ZeroStageEnum.weights}, tmp_path / "e.pt"
    )
    assert pt_files.load(tmp_path / "e.pt") == {
        "stage": ZeroStageEnum.weights,
        "plain": ZeroStageEnum.weights,
    }


@pytest.mark.parametrize("name", ["__class__", "mro", "nothing"])
def test_getattr_is_no_way_out(tmp_path: Path, name: str) -> None:
    owner = ZeroStageEnum if name != "mro" else LossScaler
    torch.save({"x": ByGetattr(owner, name)}, tmp_path / "e.pt")
    with pytest.raises(CorruptError, match="cannot be read safely"):
        pt_files.load(tmp_path / "e.pt")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch /tmp/nvme-resume-evil",)


def test_other_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="cannot be read safely"):
        pt_files.OptimFile(optimizer_file(tmp_path / "o.pt", Evil()))
    assert not Path("/tmp/nvme-resume-evil").exists()


def test_numpy_values_in_groups_are_read_once_trusted(tmp_path: Path) -> None:
    """LambdaLR with numpy makes the learning rate a numpy scalar; asked first, never silently."""
    path = tmp_path / "o.pt"
    inner = {"state": {}, "param_groups": [{"lr": np.float64(0.5), "params": []}]}
    torch.save({"x": inner}, path)
    asked = []
    assert pt_files.load(path, lambda: asked.append(1))["x"]["param_groups"][0]["lr"] == 0.5
    assert asked == [1]
    with pytest.raises(CorruptError, match="cannot be read safely"):
        pt_files.load(path)


class FakeEngine:
    """As much of an engine as ``adam`` looks at."""

    def __init__(self) -> None:
        self.param = torch.nn.Parameter(torch.linspace(-1, 1, 97))
        self.optimizer = type("Zero", (), {})()
        self.optimizer.optimizer = DeepSpeedCPUAdam([self.param], lr=1e-2, betas=(0.9, 0.95))
        adam.watch(self)

    def step(self, count: int, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.optimizer.optimizer.param_groups[0]["betas"] = betas
        for _ in range(count):
            self.param.grad = torch.sin(self.param.detach() * 3)
            self.optimizer.optimizer.step()


@pytest.mark.parametrize(
    "history", [[(40, (0.9, 0.95))], [(7, (0.9, 0.95)), (9, (0.8, 0.99)), (5, (0.8, 0.99))]]
)
def test_the_hidden_product_is_brought_back(history: list[tuple[int, tuple[float, float]]]) -> None:
    one, other = FakeEngine(), FakeEngine()
    for count, betas in history:
        one.step(count, betas)
    other.param.data.copy_(one.param.data)
    state = one.optimizer.optimizer.state[one.param]
    other.optimizer.optimizer.state[other.param] = {
        k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()
    }
    adam.restore(other, adam.capture(one))
    assert adam.capture(other) == adam.capture(one)
    betas = history[-1][1]
    one.step(20, betas)
    other.step(20, betas)
    assert torch.equal(one.param, other.param)


def test_packed_indices_follow_groups() -> None:
    assert layout_of.packed_indices([0, 1, 0, 1]) == [0, 2, 1, 3]


def test_gradients_that_deepspeed_misreads_are_named() -> None:
    mib = 1 << 20

    def param(name: str, numel: int, offset: int) -> plan.Param:
        return plan.Param(name, (numel,), numel, numel, offset)

    odd = plan.SubGroup(
        0, 0, 0, (param("first", mib, 0), param("bias", 3, mib), param("second", mib, mib + 3))
    )
    even = plan.SubGroup(1, 0, 0, (param("third", mib, 0), param("fourth", mib, mib)))
    assert supported.misread_gradients([odd, even], {0, 1}, mib, 4) == ["second"]
    assert supported.misread_gradients([odd, even], {1}, mib, 4) == []
    assert supported.misread_gradients([odd, even], {0, 1}, 8 * mib, 4) == []
