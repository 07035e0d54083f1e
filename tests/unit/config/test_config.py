"""Every bad key or value is refused with its full dotted name and a remedy."""

import copy
import dataclasses

import pytest
import yaml

from aligner.config import DPORunConfig, ParallelConfig, RSRunConfig, check_layout, parse_config
from aligner.config.experiment import ExpManagerConfig
from aligner.config.parse import defaults_of, refuse, without_new_defaults
from aligner.config.roles.model import CriticConfig, ModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.errors import AlignerError, ConfigError, LayoutError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

MINIMAL = {
    "model": {"restore_from_path": "m.nemo"},
    "reward": {"function": "a.b:reward"},
    "data": {"train": {"source": "train.jsonl"}},
}


def tree(settings=""):
    """MINIMAL with settings such as ``seed=3 model.optim.lr=1``, whose values are YAML."""
    values = copy.deepcopy(MINIMAL)
    for setting in settings.split():
        key, _, value = setting.partition("=")
        *path, last = key.split(".")
        level = values
        for name in path:
            level = level.setdefault(name, {})
        level[last] = yaml.safe_load(value)
    return values


def test_minimal_configuration_gets_documented_defaults():
    config = parse_config(MINIMAL)
    assert config.model.ppo.ratio_eps_range == (0.2, 0.2)
    assert config.trainer.ppo.discount_factor == 1.0
    assert config.trainer.max_seconds is None
    assert config.critic.optim.lr == 1e-5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2


def test_what_is_not_a_default_is_what_was_given():
    given = tree("trainer.ppo.max_steps=7 data.train.arguments.size=3")
    config = parse_config(given)
    assert without_new_defaults(config.as_dict(), {}, defaults_of(config)) == given


@pytest.mark.parametrize(
    ("settings", "monitor"),
    [
        ("", "accuracy"),
        # The share of a reward model's scores of at least 1 tells little, a verdict does.
        ("reward.kind=model reward.model.restore_from_path=r.nemo", "accuracy"),
        ("reward.kind=model reward.model.restore_from_path=r.nemo reward.function=", "rewards"),
        (
            "reward.kind=model reward.model.restore_from_path=r.nemo reward.function= "
            "exp_manager.monitor=val_rollouts/accuracy",
            "accuracy",
        ),
    ],
    ids=["function", "model and function", "model", "named"],
)
def test_the_metric_that_tells_the_best_state(settings, monitor):
    assert parse_config(tree(settings)).monitor == f"val_rollouts/{monitor}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("model.ppo.ratio_epss=0.1", ["model.ppo.ratio_epss", "model.ppo.ratio_eps?"]),
        ("sead=1", ["sead: unknown key", "Did you mean seed?"]),
        ("model.optim.sched.warmup=3", ["model.optim.sched.warmup", "warmup_steps"]),
        ("trainer.precision=fp8", ["trainer.precision", "32, bf16", "fp8"]),
        ("trainer.ppo.kl_estimator=k4", ["trainer.ppo.kl_estimator", "k1, k2, k3, abs"]),
        ("trainer.ppo.gae_lambda=1.5", ["trainer.ppo.gae_lambda", "between 0 and 1", "1.5"]),
        ("trainer.ppo.gae_lambda=.nan", ["trainer.ppo.gae_lambda", "between 0 and 1"]),
        ("model.optim.lr=0", ["model.optim.lr", "greater than 0"]),
        ("model.optim.lr=fast", ["model.optim.lr", "a number", "fast"]),
        ("model.micro_batch_size=2.5", ["model.micro_batch_size", "an integer"]),
        ("model.micro_batch_size=true", ["model.micro_batch_size", "an integer"]),
        ("seed=null", ["seed", "an integer, got null"]),
        ("model.optim.betas=[0.9]", ["model.optim.betas", "list of 2"]),
        ("model.ppo.ratio_eps=[0.1,0.2,0.3]", ["model.ppo.ratio_eps", "list of 2"]),
        ("model.ppo=3", ["model.ppo", "expected a group of keys"]),
        ("model.ppo.dual_clip=1.0", ["model.ppo.dual_clip", "greater than 1"]),
        ("trainer.max_time=4h", ["trainer.max_time", "DD:HH:MM:SS"]),
        ("cluster.address=a:1", ["cluster.address=a:1", "local", "cluster.engine=ray"]),
        (
            "cluster.engine=ray cluster.value_workers=2",
            ["cluster.value_workers=2", "cluster.colocated=false"],
        ),
        (
            "cluster.engine=ray cluster.value_workers=3 cluster.colocated=false "
            "model.tensor_model_parallel_size=2",
            ["cluster.value_workers=3", "multiple", "Use 4"],
        ),
        ("cluster.object_store_mb=8", ["cluster.object_store_mb", "at least 80"]),
        ("policy.backend=jax", ["policy.backend", "jax", "dtensor"]),
        (
            "policy.backend=dtensor model.pipeline_model_parallel_size=2 trainer.devices=2",
            ["model.pipeline_model_parallel_size=2", "policy.backend=dtensor", "=1, or"],
        ),
        (
            "policy.backend=dtensor model.tensor_model_parallel_size=2 "
            "model.sequence_parallel=true trainer.devices=2",
            ["model.sequence_parallel=true", "Set model.sequence_parallel=false"],
        ),
        ("generation.backend=vllm", ["generation.backend=vllm", "megatron"]),
        (
            "model.sequence_packing.enabled=true model.dynamic_batching.enabled=true",
            ["model.sequence_packing.enabled", "model.dynamic_batching.enabled", "exclude"],
        ),
        (
            "model.sequence_packing.enabled=true model.sequence_packing.train_mb_tokens=1001 "
            "model.context_parallel_size=2 trainer.devices=2",
            ["model.sequence_packing.train_mb_tokens=1001", "multiple of 4", "1000 or 1004"],
        ),
        (
            "model.dynamic_batching.enabled=true model.dynamic_batching.logprob_mb_tokens=64 "
            "model.ppo.length_params.max_length=60 data.max_prompt_length=10",
            ["model.dynamic_batching.logprob_mb_tokens=64", "max_length=60", "at least 70"],
        ),
        ("model.sequence_packing.algorithm=best", ["model.sequence_packing.algorithm"]),
        (
            "model.ppo.length_params.min_length=9 model.ppo.length_params.max_length=8",
            ["min_length=9", "max_length=8"],
        ),
        ("model.ppo.num_rollout_samples=127", ["num_rollout_samples=127 is not a multiple"]),
        (
            "model.ppo.num_rollout_samples=96 model.global_batch_size=64",
            ["num_rollout_samples=96", "model.global_batch_size=64", "64 or 128"],
        ),
        (
            "critic.global_batch_size=48 model.global_batch_size=64",
            ["critic.global_batch_size=48", "48 or 96"],
        ),
        (
            "model.ppo.num_rollouts_per_prompt=7",
            ["num_rollout_samples=64", "num_rollouts_per_prompt=7", "63 or 70"],
        ),
        (
            "model.micro_batch_size=24",
            ["model.global_batch_size=64", "model.micro_batch_size=24", "48 or 72"],
        ),
        (
            "critic=null trainer.ppo.advantage.estimator=grpo model.ppo.num_rollouts_per_prompt=4",
            ["trainer.ppo.normalize_advantages=true", "estimator=grpo", "Set it to false"],
        ),
        (
            "trainer.ppo.kl_controller.mode=adaptive trainer.ppo.initial_policy_kl_penalty=0",
            ["kl_controller.mode=adaptive", "initial_policy_kl_penalty=0", "fixed"],
        ),
        (
            "model.ppo.kl_loss.coef=0.1 model.ppo.kl_loss.estimator=k1",
            ["model.ppo.kl_loss.estimator=k1", "k2", "k3"],
        ),
        (
            "trainer.ppo.dynamic_sampling.enabled=true model.ppo.num_rollouts_per_prompt=4 "
            "model.optim.sched.name=cosine",
            ["model.optim.sched.name=cosine", "max_epochs", "Set model.optim.sched.max_steps"],
        ),
        ("data.train.source=''", ["data.train.source", "empty"]),
        ("model.restore_from_path=''", ["model.restore_from_path", ".nemo"]),
    ],
)
def test_refusals_name_key_value_and_remedy(settings, words):
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(settings))
    for word in words:
        assert word in str(caught.value)


def test_all_values_that_do_not_fit_are_named_at_once():
    values = tree("seed=x model.optim.lrr=1 model.ppo.ratio_eps=[0.1] critic.optim=3")
    values["data"]["train"]["source"] = "???"
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    title, *messages = str(caught.value).splitlines()
    assert title == "5 settings cannot be used:"
    assert [message.split(": ")[0] for message in messages] == [
        *("- data.train.source", "- model.optim.lrr", "- model.ppo.ratio_eps"),
        *("- seed", "- critic.optim"),
    ]
    assert "Did you mean model.optim.lr?" in messages[1]
    assert "a list of 2 values, got [0.1]" in messages[2]


def test_all_broken_rules_are_named_at_once():
    broken = [
        "model.ppo.length_params.min_length=9",
        "trainer.ppo.advantage.batch_baseline=true",
        "trainer.ppo.reward.overlong_cache=9",
        "cluster.address=a:1",
        "validation.temperature=0.5",
    ]
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(" ".join([*broken, "model.ppo.length_params.max_length=8"])))
    title, *messages = str(caught.value).splitlines()
    assert title == "5 settings cannot be used:"
    for message, setting in zip(messages, broken, strict=True):
        assert message.startswith(f"- {setting}")


@pytest.mark.parametrize("missing", ["model", "reward", "data"])
def test_required_groups(missing):
    values = {key: value for key, value in MINIMAL.items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing}: required"):
        parse_config(values)


def test_errors_are_also_value_errors():
    assert issubclass(ConfigError, AlignerError)
    assert issubclass(ConfigError, ValueError)


def test_values_are_converted_where_that_loses_nothing():
    config = parse_config(
        tree(
            "trainer.precision=32 model.optim.lr=1 model.ppo.ratio_eps=[0.2,0.28] "
            "model.micro_batch_size=8.0 trainer.max_time=01:02:03:04"
        )
    )
    assert config.trainer.precision == "32"
    assert config.model.optim.lr == 1.0
    assert config.model.ppo.ratio_eps_range == (0.2, 0.28)
    assert config.model.micro_batch_size == 8
    assert config.trainer.max_seconds == 86400 + 2 * 3600 + 3 * 60 + 4


def test_batches_must_divide_over_data_parallel_ranks():
    config = parse_config(MINIMAL)  # global 64, micro 8
    refuse(config.share_problems(4, 4))
    with pytest.raises(ConfigError, match=r"8 x 3 data-.* = 24.*trainer.devices.*48 or 72"):
        refuse(config.share_problems(3, 4))


@pytest.mark.parametrize(
    ("samples", "devices", "batch", "micro_batch"),
    [
        (64, 1, 64, 8),
        (32, 1, 32, 8),
        (4, 1, 4, 4),
        (128, 1, 64, 8),
        (96, 4, 48, 6),  # the global batch is the same on one process
        (96, 1, 48, 8),
        (100, 1, 50, 5),
        (64, 16, 64, 4),
    ],
)
def test_batch_sizes_follow_the_rollout(samples, devices, batch, micro_batch):
    config = parse_config(
        tree(f"model.ppo.num_rollout_samples={samples} trainer.devices={devices}")
    )
    for role in (config.model, config.critic):
        assert (role.global_batch_size, role.micro_batch_size) == (batch, micro_batch)


def test_batch_sizes_that_are_given_stay():
    given = "model.global_batch_size=16 critic.global_batch_size=16 critic.micro_batch_size=2"
    config = parse_config(tree(given))
    assert (config.model.global_batch_size, config.model.micro_batch_size) == (16, 8)
    assert (config.critic.global_batch_size, config.critic.micro_batch_size) == (16, 2)


def test_batches_of_other_runs_follow_too():
    model = parse_config(tree("model.rs.num_rollout_samples=32"), RSRunConfig).model
    assert (model.global_batch_size, model.micro_batch_size) == (8, 8)
    pairs = tree("model.global_batch_size=6")
    del pairs["reward"]
    assert parse_config(pairs, DPORunConfig).model.micro_batch_size == 6
    with pytest.raises(ConfigError, match=r"num_rollout_samples=64 is not a multiple of .*=128"):
        parse_config(tree("model.rs.num_rollouts_per_prompt=128"), RSRunConfig)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [(["seed"], True), (["data.shuffle"], True), (["model.ppo.ratio_eps"], False), ([], False)],
)
def test_only_accepted_changes_of_data_or_seed_let_the_data_differ(changed, expected):
    assert ExpManagerConfig(resume_changed=tuple(changed)).data_may_change is expected


SIZES = {"hidden_size": 192, "ffn_hidden_size": 192, "num_attention_heads": 9}
ARCHITECTURE = dataclasses.replace(TINY_ARCHITECTURE, num_layers=6, num_query_groups=3, **SIZES)


@pytest.mark.parametrize(
    ("parallel", "world", "words"),
    [
        (ParallelConfig(tensor=2), 2, ["9 attention heads", "3 query groups", "1, 3"]),
        (ParallelConfig(pipeline=4), 4, ["6 layers", "3", "2, 3, 6"]),
        (ParallelConfig(tensor=3), 4, ["4 processes", "3", "3 or 6"]),
        (ParallelConfig(tensor=3), 2, ["2 processes", "Start 3"]),
        (ParallelConfig(sequence_parallel=True), 1, ["model.sequence_parallel=true"]),
        (ParallelConfig(expert=2), 2, ["no experts"]),
        (ParallelConfig(first_stage=2), 1, ["first_pipeline_stage=2", "4 of 6 layers"]),
        (ParallelConfig(pipeline=3, first_stage=3), 3, ["3 of 6 layers", "2 other stages"]),
        (ParallelConfig(pipeline=2, first_stage=6), 2, ["0 of 6 layers", "1 other stages"]),
        (ParallelConfig(pipeline=2, first_stage=2, last_stage=3), 2, ["1 of 6 layers"]),
    ],
)
def test_impossible_layouts_are_refused_with_numbers(parallel, world, words):
    with pytest.raises(LayoutError) as caught:
        check_layout(ARCHITECTURE, parallel, world)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        (ParallelConfig(), 5),
        (ParallelConfig(tensor=3, sequence_parallel=True), 6),
        (ParallelConfig(tensor=3, pipeline=2), 6),
        (ParallelConfig(pipeline=2, last_stage=1), 2),
        (ParallelConfig(pipeline=4, first_stage=1, last_stage=1), 4),
        (ParallelConfig(pipeline=2, first_stage=2, last_stage=4), 2),
    ],
)
def test_possible_layouts_pass(parallel, world):
    check_layout(ARCHITECTURE, parallel, world)


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        (ParallelConfig(expert=3), 3, None),
        (ParallelConfig(expert=4), 4, "6 experts"),
        # Split like other layers, or whole where they are shared out; sequence parallelism always.
        (ParallelConfig(tensor=3, expert=3, sequence_parallel=True), 3, None),
        (ParallelConfig(tensor=3, sequence_parallel=True), 3, "64 expert columns"),
        (ParallelConfig(tensor=3, expert=3), 3, r"Set model\.sequence_parallel=true"),
    ],
)
def test_layouts_of_experts(parallel, world, message):
    moe = dataclasses.replace(ARCHITECTURE, num_moe_experts=6, moe_ffn_hidden_size=64)
    if message is None:
        check_layout(moe, parallel, world)
    else:
        with pytest.raises(LayoutError, match=message):
            check_layout(moe, parallel, world)


def test_a_critic_with_a_pipeline_of_its_own_has_equal_stages():
    policy = ModelConfig(
        "m.nemo", pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1
    )
    assert CriticConfig().with_layout(policy).parallel.first_stage == 1
    own = CriticConfig(pipeline_model_parallel_size=3).with_layout(policy).parallel
    assert (own.pipeline, own.first_stage) == (3, None)


@pytest.mark.parametrize(
    ("key", "value"), [("num_layers_in_last_pipeline_stage", 2), ("freeze_moe_router", True)]
)
def test_stages_and_routers_are_megatrons(key, value):
    model = ModelConfig("m.nemo", **{key: value})
    check_policy_backend("megatron", model)
    with pytest.raises(ConfigError, match=f"model.{key}=.*policy.backend=megatron"):
        check_policy_backend("dtensor", model)
