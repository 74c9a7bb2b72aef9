"""A Hugging Face ``Trainer`` run of case S1, one process a rank.

Called as ``python -m tests.trainer_program OUT NVME SEED STEPS GATHER [resume]``.
A tiny random Llama with dropout, ZeRO-3 with the optimizer on NVMe, ``configs/zero3_nvme_s1.json`` with smaller
blocks and sub-groups so that there is something to swap.  Writes the logged losses to ``OUT.<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import nvme_resume
from tests import harness, quick_start


def main(out: str, nvme: str, seed: str, steps: str, gather: str, resume: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    quick_start.remember_cpu()
    nvme_resume.install()
    config = json.loads((harness.ROOT / "configs" / "zero3_nvme_s1.json").read_text())
    zero = config["zero_optimization"]
    zero["offload_optimizer"] |= {"nvme_path": nvme, "pin_memory": False}
    zero["sub_group_size"] = 300_000
    zero["stage3_gather_16bit_weights_on_model_save"] = gather == "gather"
    config["aio"]["block_size"] = 1 << 20
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=int(steps),
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        weight_decay=0.01,
        warmup_steps=2,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=int(seed),
        data_seed=7,
        deepspeed=config,
    )
    torch.manual_seed(int(seed))
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=4, vocab_size=1024, attention_dropout=0.1, max_position_embeddings=64)
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 1024, (32,), generator=generator) for _ in range(96)]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows]
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    logs = [
        {k: e[k] for k in ("step", "loss", "grad_norm", "learning_rate")}
        for e in trainer.state.log_history
        if "loss" in e
    ]
    Path(f"{out}.{os.environ['RANK']}.json").write_text(json.dumps(logs))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:6], resume="resume" in sys.argv[6:])
