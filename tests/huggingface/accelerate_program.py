"""An accelerate training loop, one process a rank: ``accelerate_program CASE.json``; see ``test_accelerate``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests import quick_start
from tests.huggingface import program


def main(path: str) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import set_seed

    case: dict[str, Any] = {**program.DEFAULTS, **json.loads(Path(path).read_text())}
    quick_start.remember_cpu()
    config = program.deepspeed_config({**case, "scheduler": "none"})
    config |= {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 2,
    }
    config.pop("train_batch_size")
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        config["zero_optimization"][key] = 100_000
    set_seed(case["seed"])
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    from accelerate.utils import DummyOptim

    model = program.tiny_llama(case, attention_dropout=0.1)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, program.VOCABULARY, (96, 32), generator=generator)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    model, _, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    model.train()
    batches = list(loader)
    first = 0
    if case["resume"]:
        accelerator.load_state(case["out"])
        first = 4
    losses = []
    for step in range(first, case["steps"]):
        loss = model(input_ids=batches[step], labels=batches[step]).loss
        accelerator.backward(loss)
        losses.append(float(loss.detach()).hex())
        if not case["resume"] and step in (1, 3):
            accelerator.save_state(case["out"])  # the same folder and tag, pytorch_model, twice
    Path(f"{case['out']}.{os.environ['RANK']}.json").write_text(json.dumps({"losses": losses}))
    torch.distributed.barrier()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
