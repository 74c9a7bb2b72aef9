"""A Hugging Face training script as people write them, one process a rank: ``python -m nvme_resume.run`` starts it.

Called with the path of a JSON case (``DEFAULTS`` lists the keys).  Nothing in it names nvme_resume: that is the point.
Writes what the run logged to ``<out>.<rank>.json``.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import harness, quick_start

DEFAULTS: dict[str, Any] = {
    "kind": "trainer",  # or sft, grpo
    "deepspeed": True,
    "nvme_checkpoint": True,
    "seed": 1,
    "steps": 6,
    "rows": 96,
    "scheduler": None,  # of the Trainer; None: WarmupLR of the DeepSpeed configuration
    "gather": True,
    "lora": False,
    "resume": False,
    "arguments": {},  # of TrainingArguments
    "config": {},  # further sections of the DeepSpeed configuration
    "sigterm_at": None,
    "die_in_save_at": None,
    "fail_in_save_at": None,
    "put_before_save": False,  # a file into checkpoint-N, as a callback may
    "node_local": False,
    "ends_as_usual": False,  # with what is done at the end of a program
    "private": False,  # each rank has an output folder of its own
}
VOCABULARY = 256


def main(path: str) -> None:
    case: dict[str, Any] = {**DEFAULTS, **json.loads(Path(path).read_text())}
    quick_start.remember_cpu()
    case["report"] = f"{case['out']}.{os.environ.get('RANK', '0')}.json"
    if case["private"]:  # the same path leads to another folder
        node = Path(f"{case['out']}-of-{os.environ['RANK']}")
        node.mkdir(exist_ok=True)
        os.chdir(node)
        case["out"] = "out"
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(case["seed"])
    trainer = {"trainer": plain, "sft": sft, "grpo": grpo}[case["kind"]](case)
    disturb(trainer, case)
    trainer.train(resume_from_checkpoint=case["resume"] or None)
    finish(trainer, case)


def finish(trainer: Any, case: dict[str, Any]) -> None:
    keys = ("step", "loss", "grad_norm", "learning_rate", "reward", "eval_loss")
    logs = [{k: e[k] for k in keys if k in e} for e in trainer.state.log_history]
    logs = [e for e in logs if e.keys() & {"loss", "eval_loss"}]
    report = {"logs": logs, "best": trainer.state.best_model_checkpoint}
    Path(case["report"]).write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if case["ends_as_usual"]:
        atexit._run_exitfuncs()
    os._exit(0)


def disturb(trainer: Any, case: dict[str, Any]) -> None:
    """A signal, or a death, at a step."""
    from transformers import TrainerCallback

    class Disturb(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if case["sigterm_at"] == [state.global_step + 1, args.process_index]:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if case["put_before_save"] and args.process_index == 0:
                folder = Path(args.output_dir, f"checkpoint-{state.global_step}", "more")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "projector.bin").write_text(str(state.global_step))

    trainer.add_callback(Disturb())
    if case["fail_in_save_at"] is not None:
        at, failing = case["fail_in_save_at"]
        save_model = trainer.save_model

        def fail(*args: Any, **kwargs: Any) -> None:
            if trainer.state.global_step == at and trainer.args.process_index == failing:
                raise OSError(28, "No space left on device")
            save_model(*args, **kwargs)

        trainer.save_model = fail
    if case["die_in_save_at"] is not None:
        step, rank = case["die_in_save_at"]
        save_rng_state = trainer._save_rng_state

        def die(folder: str) -> None:
            save_rng_state(folder)
            if trainer.state.global_step == step and trainer.args.process_index == rank:
                os._exit(9)

        trainer._save_rng_state = die


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of every kind of Trainer."""
    found: dict[str, Any] = {
        "output_dir": case["out"],
        "max_steps": case["steps"],
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "bf16": case["deepspeed"],
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": case["seed"],
        "data_seed": 7,
        **case["arguments"],
    }
    if case["scheduler"] is not None:
        found["lr_scheduler_type"] = case["scheduler"]
    if case["deepspeed"]:
        found["deepspeed"] = deepspeed_config(case)
    return found


def deepspeed_config(case: dict[str, Any]) -> dict[str, Any]:
    """``configs/zero3_nvme_s1.json`` with smaller blocks and sub-groups, so that there is something to swap."""
    config: dict[str, Any] = json.loads((harness.ROOT / "configs" / "zero3_nvme_s1.json").read_text())
    zero = config["zero_optimization"]
    zero["offload_optimizer"] |= {"nvme_path": case["nvme"], "pin_memory": False}
    zero["sub_group_size"] = 300_000
    zero["stage3_gather_16bit_weights_on_model_save"] = case["gather"]
    config["aio"]["block_size"] = 1 << 20
    config["nvme_checkpoint"] = case["nvme_checkpoint"]
    config["checkpoint"] = {"use_node_local_storage": case["node_local"]}
    if case["scheduler"] is not None:
        del config["scheduler"]
    return config | case["config"]


def tiny_llama(case: dict[str, Any], **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 4} if case["deepspeed"] else {"hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    config = LlamaConfig(**size, vocab_size=VOCABULARY, max_position_embeddings=64, **changes)
    return LlamaForCausalLM(config)


def plain(case: dict[str, Any]) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**settings(case))  # before the model: ZeRO-3 partitions it while it is made
    model = tiny_llama(case, attention_dropout=0.1)
    if case["lora"]:
        from peft import LoraConfig, get_peft_model

        # Large enough to be partitioned and swapped.
        model = get_peft_model(
            model, LoraConfig(r=64, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, VOCABULARY, (32,), generator=generator) for _ in range(case["rows"])]
    data = [{"input_ids": r, "labels": r} for r in rows]
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    base = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def sentences(case: dict[str, Any], words: int) -> list[str]:
    chosen = random.Random(5)
    return [
        " ".join(f"w{chosen.randrange(3, VOCABULARY)}" for _ in range(words)) for _ in range(case["rows"])
    ]


def sft(case: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**settings(case), max_length=32)
    return SFTTrainer(
        model=tiny_llama(case, attention_dropout=0.1),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": sentences(case, 16)}),
        processing_class=tokenizer(),
    )


def grpo(case: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def many_small_words(completions: list[str], **kwargs: Any) -> list[float]:
        numbers = [[int(w[1:]) for w in text.split() if w[1:].isdigit()] for text in completions]
        return [sum(n < VOCABULARY // 2 for n in found) / 8 for found in numbers]

    arguments = GRPOConfig(**settings(case), num_generations=2, max_completion_length=8, temperature=1.0)
    return GRPOTrainer(
        model=tiny_llama(case),
        reward_funcs=many_small_words,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": sentences(case, 4)}),
        processing_class=tokenizer(),
    )


if __name__ == "__main__":
    main(sys.argv[-1])  # after what a launcher adds
