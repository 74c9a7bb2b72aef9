"""A small list of cases in which every pair of factor values that can go together does so at least once."""

from __future__ import annotations

import itertools
import random
from typing import Any

FACTORS: dict[str, list[Any]] = {
    "ranks": [1, 2, 3],
    "optimizer": ["AdamW", "Adam", "Adagrad", "Lion", "Muon"],
    "offload_param": ["none", "cpu", "nvme"],
    "offload_optimizer": ["nvme", "cpu"],
    "dtype": ["bf16", "fp32"],
    "accumulation": [1, 2],
    "clipping": [0.0, 1.0],
    "pipelined": [False, True],
    "two_groups": [True, False],
    "lora": [False, True],
    "zero_init": [False, True],
    "persistence": [0, 100_000],
}


def allowed(case: dict[str, Any]) -> bool:
    """Pairs that mean nothing (a partial case holds only some factors)."""
    get = case.get
    if get("pipelined") and get("offload_optimizer") == "cpu":
        return False
    # Muon makes its own two groups out of flags on the parameters.
    return not (get("optimizer") == "Muon" and get("two_groups") is False)


def pairwise(seed: int = 0, tries: int = 60) -> list[dict[str, Any]]:
    """Greedy: each new case is the random one (of ``tries``) that covers the most pairs still open."""
    rng = random.Random(seed)
    names = list(FACTORS)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if allowed({a: x, b: y})
    }
    cases: list[dict[str, Any]] = []
    while open_pairs:
        best: dict[str, Any] = {}
        most = 0
        a, x, b, y = min(open_pairs, key=str)
        for _ in range(tries):
            case = {n: rng.choice(FACTORS[n]) for n in names} | {a: x, b: y}
            if not allowed(case):
                continue
            gain = sum(case[p] == v and case[q] == w for p, v, q, w in open_pairs)
            if gain > most:
                best, most = case, gain
        cases.append(best)
        open_pairs = {(p, v, q, w) for p, v, q, w in open_pairs if not (best[p] == v and best[q] == w)}
    return cases


def sized(case: dict[str, Any]) -> dict[str, Any]:
    """Enough layers, and sub-groups small enough, that each rank has swapped and unswapped sub-groups."""
    layers, sub_group_size = {1: (3, 700_000), 2: (3, 300_000), 3: (4, 270_000)}[case["ranks"]]
    return {**case, "layers": layers, "sub_group_size": sub_group_size}
