"""Distillation and preference optimisation give one process's numbers in every layout.

Two updates and a validation, in whatever micro-batches: of distillation on the data's responses and
on the student's own, from a wider teacher, and of DPO (pairs) and KTO (single rows and a baseline
of the whole batch) with what the reference says asked on that layout. Responses of preference data
have one to four tokens, so that the rows of a pair differ in length. Float32 rounding differs with
the order of sums: weights agree to 1e-5 of the largest of a tensor, reported numbers to 1e-4 of
their value, or 1e-5 where that is more.

A layout is ``kind,tensor,context,pipeline,mode``; what is left of the world is data parallel and
the mode says how micro-batches are formed.
"""

import pytest
from ranks import on_ranks
from rich.console import Console
from role_checks import assert_near

from aligner.algorithms.distill.build import TeacherTargets, distill_task, teacher_config
from aligner.algorithms.preference.build import ReferenceLogprobs, preference_task
from aligner.algorithms.supervised.trainer import SupervisedTrainer
from aligner.config import DistillRunConfig, DPORunConfig, parse_config
from aligner.data.batches import PromptSampler
from aligner.data.dataset import Split
from aligner.data.preferences import LabelledDataset, PairDataset
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.workers import LocalCluster
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.policy.lm_policy import Policy
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.groups import initialize_parallel

KINDS = ("offline", "on_policy", "dpo", "kto")
DISTILL_ROWS, PREFERENCE_ROWS, TOP_K = 8, 12, 12
RUN = RunSettings(gradient_clip_val=0.0)
SIZES = ("2,1,1", "1,2,1", "1,1,1")
DEFAULT = [
    *(f"offline,{sizes},packed" for sizes in SIZES),
    "on_policy,2,1,1,packed",
    *(f"{loss},{sizes},packed" for loss in ("dpo", "kto") for sizes in ("1,1,1", "2,1,1")),
    *("dpo,1,1,1,padded", "kto,1,1,1,dynamic", "dpo,2,1,1,dynamic", "kto,2,1,1,padded"),
]
FURTHER = [
    *(f"offline,{sizes},{mode}" for sizes in SIZES for mode in ("padded", "dynamic")),
    *(f"offline,1,1,2,{mode}" for mode in ("padded", "packed")),
    *(f"on_policy,{sizes},padded" for sizes in SIZES),
]


def model_section(model, layout, rows):
    _, tensor, context, pipeline, mode = layout.split(",")
    return {
        "restore_from_path": model,
        "micro_batch_size": 2,
        "global_batch_size": rows,
        "tensor_model_parallel_size": int(tensor),
        "context_parallel_size": int(context),
        "pipeline_model_parallel_size": int(pipeline),
        "sequence_packing": {"enabled": mode == "packed", "train_mb_tokens": 56},
        "dynamic_batching": {
            **{"enabled": mode == "dynamic", "train_mb_tokens": 72},
            "sequence_length_round": 4,
        },
        "optim": {"lr": 1e-4, "eps": 1e-3},
    }


def data_section(source, train, **arguments):
    def problems(split, size):
        return {
            "source": f"aligner.examples.tasks.arithmetic:{source}",
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
        "data": data_section("arithmetic_examples", 16),
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
        "data": data_section(source, 24, wrong_by=[1, 2000]),
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


def learn_all(model, teacher, folder, layouts):
    """What is reported of two updates and a validation, and the weights after them, by layout."""
    seen = {}
    for layout in layouts:
        if layout.startswith(("dpo", "kto")):
            policy, task, rows = preference(model, layout, folder)
        else:
            policy, task, rows = distillation(model, teacher, layout)
        sampler = PromptSampler(len(task.train), rows, seed=3)
        trainer, timers = SupervisedTrainer(policy, task, sampler), PhaseTimers()
        steps = [trainer.step(step, timers).metrics for step in (1, 2)]
        weights = policy.worker_group.worker.model.whole_weights()
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
        else:
            assert second["train_optim/loss"] < first["train_optim/loss"]
        for expected, actual in zip(one["steps"], other["steps"], strict=True):
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5), layout
        assert_near(one["weights"], other["weights"], layout)
