"""The configurations people copy are accepted by the libraries that read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvme_resume import config
from tests import harness

FILES = sorted((harness.ROOT / "configs").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_hugging_face_fills_and_deepspeed_accepts_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import LlamaConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    monkeypatch.setenv("WORLD_SIZE", "1")
    arguments = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to=[], adam_beta2=0.95,
                                  learning_rate=1e-4, weight_decay=0.01, per_device_train_batch_size=1,
                                  warmup_steps=100)  # fmt: skip
    content = json.loads(path.read_text())
    filled = HfTrainerDeepSpeedConfig(content)
    filled.trainer_config_process(arguments)

    class Model:
        config = LlamaConfig(hidden_size=64)

    filled.trainer_config_finalize(arguments, Model(), num_training_steps=1000)
    assert "auto" not in json.dumps(filled.config)
    accepted = DeepSpeedConfig(filled.config)
    assert accepted.zero_config.offload_optimizer.device == "nvme"
    assert accepted.aio_config["block_size"] == content["aio"]["block_size"]
    assert config.parse(content[config.KEY]) is not None


def test_accelerate_reads_its_file() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(harness.ROOT / "configs" / "accelerate_zero3_nvme.yaml"))
    assert found.distributed_type.value == "DEEPSPEED"
    assert (harness.ROOT / found.deepspeed_config["deepspeed_config_file"]).is_file()


def test_trl_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.scripts import sft

    path = str(harness.ROOT / "configs" / "trl_sft.yaml")
    _, training, model, *_ = sft.make_parser().parse_args_and_config(
        ["--config", path, "--use_cpu"], fail_with_unknown_args=True
    )
    assert training.save_total_limit == 2 and model.model_name_or_path


def test_there_is_one_for_each_row_of_the_readme() -> None:
    text = (harness.ROOT / "configs" / "README.md").read_text()
    everything = [p for p in (harness.ROOT / "configs").iterdir() if p.name != "README.md"]
    assert FILES
    assert all(f"`{path.name}`" in text for path in everything)
    for path in everything:
        assert ("(untested)" in next(line for line in text.splitlines() if f"`{path.name}`" in line)) == (
            "UNTESTED" in path.read_text()
        )
