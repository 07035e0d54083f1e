"""Cases of `dry_roles.phases` that meet every pair of their factors' values that can be configured.

The table is generated: of all combinations that the configuration takes, the one is chosen that
brings most pairs not met yet, until none is left. So the first rows bring most.
"""

import dataclasses
import itertools
from functools import cache

import numpy as np

from aligner.config import LoraConfig, ParallelConfig, PeftConfig, TrainedModelConfig, check_layout
from aligner.config.roles.policy import check_policy_backend
from aligner.errors import AlignerError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

FACTORS = {
    "role": (
        *("actor", "critic", "reward", "dpo", "student", "teacher", "reference", "swapped"),
        "shared reward",
    ),
    "backend": ("megatron", "dtensor"),
    "dp": (1, 2),
    "tp": (1, 2),
    "pp": ("one", "first", "last"),  # stages, and which of two this process has
    "cp": (1, 2),
    "ep": (1, 2),
    "batching": ("padded", "dynamic", "packed"),
    "precision": ("32", "bf16"),
    "recompute": (None, "selective", "full"),
    "trained": (True, False),
    "lora": (False, True),
    "offload": (False, True),
}
NAMES = tuple(FACTORS)
# aligner.config.{reward_model,reward,distill} refuse these roles on another backend.
MEGATRON_ALONE = ("reward", "shared reward", "student", "teacher")
ALWAYS_TRAINED = ("dpo", "student")  # untrained, they are actors
NEVER_TRAINED = ("teacher",)
MIXTURE = dataclasses.replace(  # as `dry_roles` has it, which this process cannot import
    TINY_ARCHITECTURE, num_moe_experts=4, moe_ffn_hidden_size=32, family="mixtral"
)


@cache
def layout_works(backend, dp, tp, pp, cp, ep, lora):
    """Whether the configuration takes a layout, by its own checks."""
    if backend == "dtensor" and lora:
        return False  # the backend refuses adapters of a .nemo, which these cases build
    stages = 1 if pp == "one" else 2
    parallel = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "sequence_parallel": tp > 1 and backend == "megatron",
    }
    peft = PeftConfig(
        peft_scheme="lora" if lora else None, lora_tuning=LoraConfig(target_modules=("attention",))
    )
    try:
        model = TrainedModelConfig(restore_from_path="model.nemo", peft=peft, **parallel)
        check_policy_backend(backend, model)
        layout = ParallelConfig(tp, stages, cp, ep, parallel["sequence_parallel"])
        check_layout(MIXTURE if ep > 1 else TINY_ARCHITECTURE, layout, dp * tp * stages * cp)
    except AlignerError:
        return False
    return True


def works(case):
    role, trained = case["role"], case["trained"]
    return (
        layout_works(*(case[name] for name in ("backend", "dp", "tp", "pp", "cp", "ep", "lora")))
        and not (case["backend"] != "megatron" and role in MEGATRON_ALONE)
        and not (not trained and role in ALWAYS_TRAINED)
        and not (trained and role in NEVER_TRAINED)
        # One body has the weights of two models, which adapters do not have.
        and not (case["lora"] and role in ("shared reward", "teacher"))
    )


@cache
def _numbers():
    """Of the combinations that work: their values and pairs as numbers; and how many pairs."""
    sizes = [range(len(values)) for values in FACTORS.values()]
    rows = [row for row in itertools.product(*sizes) if works(named(row))]
    values = np.array(rows, dtype=np.int32)
    pairs, first = [], 0
    for left, right in itertools.combinations(range(len(NAMES)), 2):
        width = len(FACTORS[NAMES[right]])
        pairs.append(first + values[:, left] * width + values[:, right])
        first += len(FACTORS[NAMES[left]]) * width
    return values, np.stack(pairs, axis=1), first


def named(row):
    return {name: FACTORS[name][number] for name, number in zip(NAMES, row, strict=True)}


@cache
def table():
    """The combinations that together meet every pair, those that bring most first."""
    values, pairs, count = _numbers()
    left = np.zeros(count, dtype=bool)
    left[np.unique(pairs)] = True
    chosen = []
    while left.any():
        best = int(left[pairs].sum(axis=1).argmax())
        chosen.append(named(values[best].tolist()))
        left[pairs[best]] = False
    return chosen


def pairs_of(case):
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def all_pairs():
    return {
        frozenset([(left, one), (right, other)])
        for left, right in itertools.combinations(NAMES, 2)
        for one in FACTORS[left]
        for other in FACTORS[right]
    }


def arguments(case):
    """A combination as `dry_roles.phases` takes it."""
    stages = 1 if case["pp"] == "one" else 2
    world = case["dp"] * case["tp"] * stages * case["cp"]
    given = {key: case[key] for key in NAMES if key not in ("dp", "pp")}
    if case["role"] == "swapped":
        given |= {"role": "reference", "reference": "swap"}
    rank = world - 1 if case["pp"] == "last" else 0
    return given | {"world": world, "rank": rank, "pp": stages}


def name_of(case):
    said = [case["role"]]
    plain = {name: values[0] for name, values in FACTORS.items()}
    for name, value in case.items():
        if name != "role" and value != plain[name]:
            say = {True: name, False: f"not {name}"}
            said.append(say[value] if isinstance(value, bool) else f"{name} {value}")
    return ", ".join(said)
