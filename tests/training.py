"""A small training program for resume tests: one process a rank, everything decided by a JSON case.

Run as ``python -m tests.training CASE.json`` with RANK, WORLD_SIZE, ... set (``tests.harness`` does).  It builds a
model from ``seed``, optionally loads a checkpoint, trains to ``until``, optionally saves, and writes losses and
state digests to ``<out>.<rank>.json``.  ``mode`` chooses plain DeepSpeed or nvme_resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests import quick_start

WIDTH = 768


def build_model(case: dict[str, Any]) -> Any:
    import torch

    class Net(torch.nn.Module):
        """Linear layers (large), norms and biases (small), dropout; optionally a frozen base."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(case["layers"]))
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(case["layers"]))
            self.drop = torch.nn.Dropout(case["dropout"])
            self.register_buffer("seen", torch.zeros(1, dtype=torch.float32))

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                self.seen.add_(1.0)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + self.drop(torch.tanh(layer(norm(x))))
            return (x.float() ** 2).mean()

    return Net()


def ds_config(case: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": case["sub_group_size"],
        "stage3_param_persistence_threshold": case["persistence"],
        "overlap_comm": False,
        "stage3_max_live_parameters": 2_000_000,
        "stage3_prefetch_bucket_size": 400_000,
        "reduce_bucket_size": 1_000_000,
    }
    if case["optimizer"] == "Muon":
        zero["reduce_scatter"] = False
    nvme = {"nvme_path": case["nvme_path"]}
    if case["offload_optimizer"] != "none":
        zero["offload_optimizer"] = {"device": case["offload_optimizer"], "pin_memory": False}
        if case["offload_optimizer"] == "nvme":
            zero["offload_optimizer"] |= nvme | {
                "buffer_count": case["buffers"] or (12 if case["pipelined"] else 5),
                "pipeline_read": case["pipelined"],
                "pipeline_write": case["pipelined"],
            }
    if case["offload_param"] != "none":
        zero["offload_param"] = {"device": case["offload_param"], "pin_memory": False}
        if case["offload_param"] == "nvme":
            zero["offload_param"] |= nvme | {"buffer_count": 24, "buffer_size": 700_000, "max_in_cpu": 0}
    params: dict[str, Any] = {"lr": 1e-3}
    if case["optimizer"] in ("AdamW", "Adam"):
        params |= {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
    elif case["optimizer"] == "Lion":
        params |= {"betas": [0.9, 0.95], "weight_decay": 0.01}
    elif case["optimizer"] == "Muon":
        params = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}
    options = case["nvme_checkpoint"]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case["accumulation"],
        "gradient_clipping": case["clipping"],
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "aio": {
            "block_size": case["block_size"],
            "queue_depth": 8,
            "intra_op_parallelism": case["intra_op_parallelism"],
            "single_submit": False,
            "overlap_events": True,
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}},
        "optimizer": {"type": case["optimizer"], "params": params},
        "steps_per_print": 10**9,
        "nvme_checkpoint": options[int(os.environ["RANK"])] if isinstance(options, list) else options,
    }
    if case["node_local"]:
        config["checkpoint"] = {"use_node_local_storage": True}
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if case["optimizer_from_code"]:
        del config["optimizer"]
    return config


def parameters(case: dict[str, Any], model: Any) -> Any:
    """One group, or decay/no-decay with a tiny second group; ``lora``: a frozen base."""
    if case["lora"]:
        for index, layer in enumerate(model.layers):
            if index % 2 == 0:
                layer.weight.requires_grad_(False)
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if case["optimizer"] == "Muon":
        for name, param in model.named_parameters():
            param.use_muon = "layers" in name and "weight" in name
        return [p for _, p in trainable]
    if not case["two_groups"]:
        return [p for _, p in trainable]
    small = [p for n, p in trainable if "norm" in n or n.endswith("bias")]
    large = [p for n, p in trainable if not ("norm" in n or n.endswith("bias"))]
    return [{"params": large, "weight_decay": 0.01}, {"params": small, "weight_decay": 0.0}]


def seed_all(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def batch(case: dict[str, Any], rank: int, micro: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * micro + rank)
    data = torch.randn(4, WIDTH, generator=generator)
    return data.bfloat16() if case["dtype"] == "bf16" else data


def make_engine(case: dict[str, Any]) -> Any:
    quick_start.remember_cpu()
    import deepspeed

    from nvme_resume import NvmeResumeEngine

    seed_all(case["seed"])
    config = ds_config(case)
    # Other things built in the process shift DeepSpeed's parameter ids.
    context: Any = contextlib.nullcontext()
    # On a CPU without fp16 DeepSpeed 0.19.8 makes bf16 parameters of fp32 ones when it has to partition them for NVMe
    # by itself (partition_parameters.py::_set_dtype ignores the dtype it is given).
    if case["zero_init"] or (case["dtype"] == "fp32" and case["offload_param"] == "nvme"):
        context = deepspeed.zero.Init(config_dict_or_path=config)
    with context:
        model = build_model(case)
    arguments: dict[str, Any] = {
        "model": model,
        "config": config,
        "model_parameters": parameters(case, model),
    }
    engine, *_ = deepspeed.initialize(**arguments)
    if case["mode"] == "ours":
        engine = NvmeResumeEngine.wrap(engine)
    return engine


def digests(engine: Any) -> Any:
    from nvme_resume.zero3.digest import state_digests

    found = state_digests(engine)
    return found


def failing_load(engine: Any, load: dict[str, Any]) -> dict[str, Any]:
    """A load that must fail: what it said, and whether engine and swap folder stayed as they were."""
    from nvme_resume import NvmeResumeError

    before = digests(engine)
    try:
        engine.load_checkpoint(load["dir"], tag=load.get("tag"))
    except NvmeResumeError as error:
        return {"type": type(error).__name__, "text": str(error), "untouched": digests(engine) == before}
    return {"type": "none", "text": "no error", "untouched": False}


def save_checkpoint(
    engine: Any, save: dict[str, Any], rank: int, position: int, result: dict[str, Any]
) -> None:
    """One save; the mishaps a test asks for are errors to be noted, not to die of."""
    from nvme_resume import NvmeResumeError
    from nvme_resume.storage import disk as seam

    tag = f"t{rank}" if save.get("tag_per_rank") else save.get("tag")
    mishap = {"limit_rank", "absent_rank", "tag_per_rank", "fault", "lost_rank"} & save.keys()
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if save.get("limit_rank") == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, no_limit[1]))
    if save.get("kill_at"):
        from nvme_resume import _native

        _native._testing_kill_at(save["kill_at"])
    if save.get("fault") and save["fault"][0] == rank:
        from nvme_resume import _native

        _native._testing_faults([tuple(save["fault"][1:])])
    if save.get("absent_rank") == rank:
        time.sleep(30)
        os._exit(0)
    if save.get("lost_rank") and save["lost_rank"][0] == rank:
        from tests.engine.lost import LosingDisk

        seam.disk = LosingDisk(*save["lost_rank"][1:])
    try:
        engine.save_checkpoint(save["dir"], tag=tag, client_state={"micro": position, "where": Path("x")})
        if save.get("wait"):
            engine.wait_for_checkpoint()
    except NvmeResumeError as error:
        if not mishap:
            raise
        result.setdefault("save_errors", []).append({"type": type(error).__name__, "text": str(error)})
        if {"absent_rank", "lost_rank"} & save.keys():
            result["losses"] = []
            raise SystemExit from error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    if save.get("network_fails") == rank:
        fail_next_send()
    for _ in range(save.get("waits", 0)):
        try:
            engine.wait_for_checkpoint()
        except NvmeResumeError as error:
            result.setdefault("wait_errors", []).append({"type": type(error).__name__, "text": str(error)})
    if not save.get("skip_digest"):
        result.setdefault("saved", []).append(digests(engine))
    if save.get("remove") and rank == 0:
        shutil.rmtree(save["dir"])


def fail_next_send() -> None:
    """The network breaks once, in the middle of a file that goes to another node."""
    from nvme_resume.nodes.channel import Channel

    send = Channel.send_block

    def fail(self: Any, block: Any) -> Any:
        Channel.send_block = send  # type: ignore[method-assign]
        with self._named("sending"):
            raise RuntimeError("the network is down")

    Channel.send_block = fail  # type: ignore[method-assign]


refused: list[tuple[str, str]] = []


def refused_save(engine: Any, folder: str) -> tuple[str, str]:
    """What a save says that must not be made."""
    from nvme_resume import NvmeResumeError

    try:
        engine.save_checkpoint(folder)
    except NvmeResumeError as error:
        return type(error).__name__, str(error)
    return "none", "saved"


def poke(engine: Any) -> None:
    """Change one master and one moment through DeepSpeed's public functions, which swap in and write back."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    weight = engine.module.layers[0].weight
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)
    moment = safe_get_full_optimizer_state(weight, "exp_avg_sq")
    safe_set_full_optimizer_state(weight, moment * 2, "exp_avg_sq")


def train(case: dict[str, Any], engine: Any, rank: int, start: int, until: int) -> list[str]:
    """Micro batches ``start`` to ``until``; losses as hexadecimal floats."""
    losses = []
    for micro in range(start, until):
        loss = engine(batch(case, rank, micro))
        engine.backward(loss)
        if case["save_after_backward"]:
            refused.append(refused_save(engine, case["save_after_backward"]))
        engine.step()
        losses.append(float(loss).hex())
    return losses


def main(path: str) -> None:
    case = json.loads(Path(path).read_text())
    rank = int(os.environ["RANK"])
    if case["private"]:
        node = Path(case["private"], f"node{case['nodes'][rank]}")
        node.mkdir(parents=True, exist_ok=True)
        os.chdir(node)
    import torch

    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    out = Path(f"{case['out']}.{rank}.json")
    try:
        engine = make_engine(case)
        start = 0
        if case["list_bare_handles"]:
            from nvme_resume.zero3.redirect import bare_holders

            result["bare_handles"] = bare_holders()
        result["failures"] = [failing_load(engine, load) for load in case["failing_loads"]]
        if case["train_before_load"]:
            train(case, engine, rank, 50, 51)
        if case["load"]:
            load = case["load"]
            tags = load if isinstance(load, dict) else {"dir": load}
            found, state = engine.load_checkpoint(
                tags["dir"], tag=tags.get("tag"), **{k: v for k, v in tags.items() if k not in ("dir", "tag")}
            )
            result["load_path"] = found
            start = (state or {}).get("micro", 0)
            result["loaded"] = None if case["skip_loaded_digest"] else digests(engine)
            result["global_steps"] = engine.global_steps
            if case["corrupt_rng_after_load"]:
                seed_all(1)
        result["start"] = start
        result["losses"] = []
        position = start
        for save in [*case["saves"], {"at": case["until"], "dir": None}]:
            result["losses"] += train(case, engine, rank, position, save["at"])
            position = save["at"]
            if save["dir"]:
                save_checkpoint(engine, save, rank, position, result)
            elif save.get("digest"):
                result.setdefault("saved", []).append(digests(engine))
            if save.get("poke"):
                poke(engine)
        if case["reload"]:
            found, state = engine.load_checkpoint(case["reload"])
            result["reloaded_losses"] = train(case, engine, rank, state["micro"], case["until"])
        result["refused"] = refused
        result["final"] = digests(engine) if not case["skip_final_digest"] else None
        if case["mode"] == "ours" and case["end"] == "wait":
            engine.wait_for_checkpoint()
    except BaseException as error:
        result["error"] = {"type": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    out.write_text(json.dumps(result))
    if "error" in result:
        sys.stderr.write(result["error"]["trace"])
        sys.stderr.flush()
        os._exit(3)
    # Not through interpreter teardown: rank 0 may still be reading from the store when a peer leaves.
    torch.distributed.barrier()
    if case["end"] != "exit":
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
