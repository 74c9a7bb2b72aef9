"""The built-in workload: a random Llama of two million parameters, dropout on, data made on the spot.

Nothing is downloaded.  Dropout makes the losses depend on the random state, the tiny group without weight
decay stays below the size that DeepSpeed swaps, and both must come back for the losses to match.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DATA_SEED = 20240607
BATCH, LENGTH, VOCABULARY, USED_TOKENS = 2, 64, 1024, 96


class TinyLlama:
    """One rank's model and data."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        torch.manual_seed(seed)
        self.model: torch.nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=LENGTH,
                attention_dropout=0.1,
                attn_implementation="eager",
                use_cache=False,
            )
        )
        self.model.train()
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        no_decay = [p for p in self.model.parameters() if p.ndim <= 1]
        for scale in no_decay:  # norms start at one whatever the seed: a loss of them would go unseen
            scale.data.add_(torch.randn_like(scale), alpha=0.05)
        self.optimizer_groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]

    def batches(self, step: int) -> Iterator[dict[str, Any]]:
        """Counting sequences with random starts and strides: easy to learn, so that the losses move."""
        micro_step = 0
        while True:
            seed = ((DATA_SEED + step) * 10_007 + self.rank) * 1_009 + micro_step
            generator = torch.Generator().manual_seed(seed)
            start = torch.randint(USED_TOKENS, (BATCH, 1), generator=generator)
            stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
            tokens = (start + stride * torch.arange(LENGTH)) % USED_TOKENS
            yield {"input_ids": tokens, "labels": tokens.clone()}
            micro_step += 1


def build(rank: int, world_size: int, seed: int) -> TinyLlama:
    """The factory behind ``nvme-resume check`` without ``--factory``."""
    return TinyLlama(rank, seed)
