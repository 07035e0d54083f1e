"""Supervised training gives one process's numbers in every layout.

Two updates and a validation, in whatever micro-batches: of distillation on the data's responses and
on the student's own, from a wider teacher; of DPO (pairs) and KTO (single rows and a baseline of
the whole batch) with what the reference says asked on that layout; of reward models, from pairs and
from ratings of which some are missing. Responses of preference data have one to four tokens, so
that the rows of a pair differ in length. Float32 rounding differs with the order of sums: weights
agree to 1e-5 of the largest of a tensor, reported numbers to 1e-4 of their value, or 1e-5 where
that is more.

A layout is ``kind,tensor,context,pipeline,mode``; what is left of the world is data parallel and
the mode says how micro-batches are formed.
"""

import pytest
import torch
from ranks import on_ranks
from rich.console import Console
from role_checks import assert_near

from aligner.algorithms.distill.build import TeacherTargets, distill_task, teacher_config
from aligner.algorithms.preference.build import ReferenceLogprobs, preference_task
from aligner.algorithms.reward_model.build import kind_of
from aligner.algorithms.supervised.trainer import SupervisedTrainer, Task
from aligner.config import DistillRunConfig, DPORunConfig, RewardRunConfig, parse_config
from aligner.data.batches import PromptSampler
from aligner.data.dataset import Split
from aligner.data.preferences import LabelledDataset, PairDataset, collate_pairs, collate_rated
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.workers import LocalCluster
from aligner.examples.tasks.form_pairs import form_pairs
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.policy.lm_policy import Policy
from aligner.models.reward.reward_model import RewardModel
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.groups import initialize_parallel

KINDS = ("offline", "on_policy", "dpo", "kto", "pairs", "ratings")
DISTILL_ROWS, PREFERENCE_ROWS, TOP_K = 8, 12, 12
ARITHMETIC = "aligner.examples.tasks.arithmetic"
RUN = RunSettings(gradient_clip_val=0.0)
SIZES = ("2,1,1", "1,2,1", "1,1,1")
DEFAULT = [
    *(f"offline,{sizes},packed" for sizes in SIZES),
    "on_policy,2,1,1,packed",
    *(f"{loss},{sizes},packed" for loss in ("dpo", "kto") for sizes in ("1,1,1", "2,1,1")),
    *("dpo,1,1,1,padded", "kto,1,1,1,dynamic", "dpo,2,1,1,dynamic", "kto,2,1,1,padded"),
    *(f"{kind},1,1,1,{mode}" for kind in ("pairs", "ratings") for mode in ("padded", "packed")),
    *("pairs,2,1,1,padded", "ratings,2,1,1,packed", "pairs,1,2,1,padded", "pairs,1,1,2,padded"),
]
FURTHER = [
    *(f"offline,{sizes},{mode}" for sizes in SIZES for mode in ("padded", "dynamic")),
    *(f"offline,1,1,2,{mode}" for mode in ("padded", "packed")),
    *(f"on_policy,{sizes},padded" for sizes in SIZES),
]


def model_section(model, layout, rows):
    kind, tensor, context, pipeline, mode = layout.split(",")
    is_reward = kind in ("pairs", "ratings")
    return {
        "restore_from_path": model,
        "micro_batch_size": 2,
        "global_batch_size": rows,
        "tensor_model_parallel_size": int(tensor),
        "context_parallel_size": int(context),
        "pipeline_model_parallel_size": int(pipeline),
        "sequence_parallel": is_reward and tensor == "2",
        "sequence_packing": {
            **{"enabled": mode == "packed", "train_mb_tokens": 96 if is_reward else 56}
        },
        "dynamic_batching": {
            **{"enabled": mode == "dynamic", "train_mb_tokens": 72},
            "sequence_length_round": 4,
        },
        # Rewards with nearly plain descent: Adam would blow up the rounding of gradients near 0.
        "optim": {"lr": 0.1, "eps": 1.0} if is_reward else {"lr": 1e-4, "eps": 1e-3},
    }


def data_section(source, train, **arguments):
    def problems(split, size):
        return {
            "source": source,
            "arguments": {"split": split, "size": size, "shots": 1, **arguments},
        }

    return {"train": problems("train", train), "validation": problems("validation", 5)}


def distillation(model, teacher, layout):
    """Student, task and rows of a batch."""
    on_policy = layout.startswith("on_policy")
    options = {"kl": "mixed", "mixed_weight": 0.4, "top_k": TOP_K, "on_policy": on_policy}
    sampling = {"length_params": {"max_length": 5}, "sampling_params": {"temperature": 0.8}}
    values = {
        "model": {**model_section(model, layout, DISTILL_ROWS), "distill": sampling},
        "teacher": {"restore_from_path": teacher, "micro_batch_size": 4},
        "data": data_section(f"{ARITHMETIC}:arithmetic_examples", 16),
        "trainer": {"distill": options, "devices": 2},
    }
    config, tokenizer = parse_config(values, DistillRunConfig), byte_level_tokenizer()
    cluster = LocalCluster(initialize_parallel(config.model.parallel))
    student, handle = (
        Policy(cluster, role, tokenizer, run=RUN, init_optimizer=learns, init_reference_model=False)
        for role, learns in ((config.model, True), (teacher_config(config), False))
    )
    kind = PromptDataset if on_policy else ExampleDataset
    examples = Split.load(kind, config.data, tokenizer)
    seed = config.seed if on_policy else None
    targets = TeacherTargets(handle, TOP_K, vocab_size=259, seed=seed)
    return student, distill_task(config, examples, tokenizer.pad_id, targets), DISTILL_ROWS


def preference(model, layout, folder):
    """Policy, task and examples of a batch."""
    loss, tensor, *_ = layout.split(",")
    source = "arithmetic_labels" if loss == "kto" else "arithmetic_pairs"
    values = {
        "model": model_section(model, layout, PREFERENCE_ROWS),
        "data": data_section(f"{ARITHMETIC}:{source}", 24, wrong_by=[1, 2000]),
        "trainer": {"dpo": {"loss": loss}, "devices": int(tensor)},
    }
    config, tokenizer = parse_config(values, DPORunConfig), byte_level_tokenizer()
    cluster = LocalCluster(initialize_parallel(config.model.parallel))
    policy = Policy(cluster, config.model, tokenizer, run=RUN, init_reference_model=False)
    kind = LabelledDataset if loss == "kto" else PairDataset
    sets = Split.load(kind, config.data, tokenizer).named
    asking = ReferenceLogprobs(policy, folder / layout, tokenizer.pad_id, Console(quiet=True))
    task = preference_task(config, asking.of(sets, config), tokenizer.pad_id)
    return policy, task, PREFERENCE_ROWS // config.rows_per_example


def rated_rows(**arguments):
    """Form 1 or 0, and how long the answer is; one of the two is missing in every third row."""
    for index, row in enumerate(form_pairs(**arguments)):
        response = row["chosen" if index % 2 else "rejected"]
        ratings = {"form": float(index % 2), "length": len(response) / 10}
        if index % 3 == 0:
            ratings["form" if index % 2 else "length"] = None
        yield {"prompt": row["prompt"], "response": response, **ratings}


def reward_model(model, layout):
    """Reward model with a head that is not fresh, task and examples of a batch."""
    is_rated = layout.startswith("ratings")
    source = (
        f"{__file__}:rated_rows" if is_rated else "aligner.examples.tasks.form_pairs:form_pairs"
    )
    columns = {"attribute_columns": ["form", "length"]} if is_rated else {}
    values = {
        "model": model_section(model, layout, PREFERENCE_ROWS),
        "data": {**data_section(source, 24, longest=12), **columns},
        "trainer": {
            "reward_model": {"loss": "regression" if is_rated else "bradley_terry"},
            "devices": 2,
        },
    }
    config, tokenizer = parse_config(values, RewardRunConfig), byte_level_tokenizer()
    cluster = LocalCluster(initialize_parallel(config.model.parallel))
    attributes = config.data.attribute_columns
    handle = RewardModel(cluster, config.model, tokenizer, RUN, attributes=attributes)
    role = handle.worker_group.worker.model
    if role.parallel.is_last_stage:
        role.gpt.rm_head.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    role.optimizer.copy_model_weights()
    examples = Split.load(kind_of(config), config.data, tokenizer)
    collate, loss = collate_pairs, BradleyTerryLoss()
    if is_rated:
        collate, loss = collate_rated, AttributeRegressionLoss()
    task = Task(
        examples.train, examples.validation, lambda rows: collate(rows, tokenizer.pad_id), loss
    )
    return handle, task, PREFERENCE_ROWS // config.rows_per_example


def learn_all(model, teacher, folder, layouts):
    """What is reported of two updates and a validation, and the weights after them, by layout."""
    seen = {}
    for layout in layouts:
        if layout.startswith(("dpo", "kto")):
            role, task, rows = preference(model, layout, folder)
        elif layout.startswith(("pairs", "ratings")):
            role, task, rows = reward_model(model, layout)
        else:
            role, task, rows = distillation(model, teacher, layout)
        sampler = PromptSampler(len(task.train), rows, seed=3)
        trainer, timers = SupervisedTrainer(role, task, sampler), PhaseTimers()
        steps = [trainer.step(step, timers).metrics for step in (1, 2)]
        weights = role.worker_group.worker.model.whole_weights()
        if isinstance(role, RewardModel):
            batch = task.collate([task.train[index] for index in range(4)])
            weights["rewards"] = role.get_rewards(batch)["rewards"]
        seen[layout] = {
            "steps": [*steps, trainer.validate(2, timers).metrics],
            "weights": {name: value.clone() for name, value in weights.items()},
        }
    return seen


@pytest.mark.timeout(700)  # two starts of ranks, with 280 s each
@pytest.mark.parametrize(
    "layouts", [DEFAULT, pytest.param(FURTHER, marks=pytest.mark.extended)], ids=["few", "all"]
)
def test_a_layout_equals_one_process(layouts, tiny_nemo, teacher, tmp_path_factory):
    kinds = [kind for kind in KINDS if any(layout.startswith(kind) for layout in layouts)]
    alone, together = (
        on_ranks(
            *(ranks, learn_all, str(tiny_nemo), str(teacher)),
            *(tmp_path_factory.mktemp("supervised"), given),
        )
        for ranks, given in ((1, [f"{kind},1,1,1,padded" for kind in kinds]), (2, layouts))
    )
    for layout in layouts:
        kind = layout.split(",")[0]
        one, other = alone[f"{kind},1,1,1,padded"], together[layout]
        first, second, _ = one["steps"]
        if kind in ("dpo", "kto"):
            assert second["train_optim/rewards_margin"] != 0  # there was something to compare
        elif kind in ("pairs", "ratings"):
            assert one["weights"]["rewards"].std() > 0.05
        else:
            assert second["train_optim/loss"] < first["train_optim/loss"]
        for expected, actual in zip(one["steps"], other["steps"], strict=True):
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5), layout
        # Pairs give the bias of a head no gradient: what moves it is rounding.
        smallest = 1e-3 if kind == "pairs" else 1e-6
        assert_near(one["weights"], other["weights"], layout, smallest)
