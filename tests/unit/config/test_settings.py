"""Meaning and defaults of settings: derived batch sizes, layouts, adapters, and losses."""

import dataclasses
from types import SimpleNamespace

import pytest
from recipes import composed
from settings import parsed, tree

from aligner.algorithms.distill.build import check_teacher
from aligner.algorithms.preference.build import preference_loss
from aligner.checkpoint.adapters import adapter_shapes
from aligner.config import (
    DistillRunConfig,
    DPORunConfig,
    GenerateConfig,
    LoraConfig,
    ParallelConfig,
    PeftConfig,
    RSRunConfig,
    check_layout,
    load_config,
    parse_config,
)
from aligner.config.experiment import ExpManagerConfig
from aligner.config.fields import NonNegative
from aligner.config.parse import build, defaults_of, refuse, without_new_defaults
from aligner.config.roles.model import CriticConfig, ModelConfig
from aligner.distributed.named_sharding import NamedSharding
from aligner.errors import CheckpointNotFoundError, ConfigError, LayoutError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.preference import DPOLoss, IPOLoss, KTOLoss, RPOLoss, SimPOLoss
from aligner.models.gpt.role.settings import (
    RunSettings,
    critic_settings,
    policy_settings,
    settings_to_continue,
)
from aligner.models.handle import check_whole_groups


def test_only_given_values_differ_from_the_defaults():
    given = tree("trainer.ppo.max_steps=7 data.train.arguments.size=3")
    config = parse_config(given)
    assert without_new_defaults(config.as_dict(), {}, defaults_of(config)) == given
    assert config.critic.optim.lr == 1e-5


REWARD_MODEL = "reward.kind=model reward.model.restore_from_path=r.nemo"


@pytest.mark.parametrize(
    ("settings", "monitor"),
    [
        ("", "accuracy"),
        # Accuracy would be the share of a reward model's scores of at least 1.
        (REWARD_MODEL, "accuracy"),
        (f"{REWARD_MODEL} reward.function=", "rewards"),
        (f"{REWARD_MODEL} reward.function= exp_manager.monitor=val_rollouts/accuracy", "accuracy"),
    ],
)
def test_the_metric_that_determines_the_best_state(settings, monitor):
    assert parsed(settings).monitor == f"val_rollouts/{monitor}"


def test_values_are_converted_without_loss():
    config = parsed(
        "trainer.precision=32 model.optim.lr=1 model.ppo.ratio_eps=[0.2,0.28] "
        "model.micro_batch_size=8.0"
    )
    assert config.trainer.precision == "32"
    assert config.model.optim.lr == 1.0
    assert config.model.ppo.ratio_eps_range == (0.2, 0.28)
    assert config.model.micro_batch_size == 8
    config = parsed({"seed": 2**63 - 1, "trainer.max_time": "400:99:59:59"})
    assert config.seed == 2**63 - 1
    assert config.trainer.max_seconds == ((400 * 24 + 99) * 60 + 59) * 60 + 59
    with pytest.raises(ConfigError, match="must be a finite number at least 0, got inf"):
        build(NonNegative, float("inf"))
    values = {"model": {"restore_from_path": "m.nemo"}, "prompt": [""]}
    config = parse_config({**values, "data": {"system_prompt": ""}}, GenerateConfig)
    assert (config.prompt, config.data.system_prompt) == (("",), "")


def test_a_command_is_a_text_or_words():
    agent = {"reward.kind": "environment", "reward.function": None, "environment.kind": "endpoint"}
    for command in ("python my.py -a 'b c'", ["python", "my.py", "-a", "b c"]):
        environment = parsed({**agent, "environment.command": command}).environment
        assert environment.words == ["python", "my.py", "-a", "b c"]
        assert environment.setting == "environment.command=\"python my.py -a 'b c'\""


def test_batches_must_divide_over_data_parallel_ranks():
    config = parsed()  # global 64, micro 8
    refuse(config.share_problems(4, 4))
    with pytest.raises(ConfigError, match=r"8 x 3 data-.* = 24.*trainer.devices.*48 or 72"):
        refuse(config.share_problems(3, 4))


@pytest.mark.parametrize(
    ("samples", "devices", "batch", "micro_batch"),
    [
        (64, 1, 64, 8),
        (4, 1, 4, 4),
        (128, 1, 64, 8),
        (96, 4, 48, 6),  # the global batch is the same on one process
        (96, 1, 48, 8),
        (100, 1, 50, 5),
    ],
)
def test_batch_sizes_follow_the_rollout(samples, devices, batch, micro_batch):
    config = parsed(f"model.ppo.num_rollout_samples={samples} trainer.devices={devices}")
    for role in (config.model, config.critic):
        assert (role.global_batch_size, role.micro_batch_size) == (batch, micro_batch)


def test_given_batch_sizes_are_kept_and_other_runs_derive_them_too():
    config = parsed(
        "model.global_batch_size=16 critic.global_batch_size=16 critic.micro_batch_size=2"
    )
    assert (config.model.global_batch_size, config.model.micro_batch_size) == (16, 8)
    assert (config.critic.global_batch_size, config.critic.micro_batch_size) == (16, 2)
    model = parsed("model.rs.num_rollout_samples=32", RSRunConfig).model
    assert (model.global_batch_size, model.micro_batch_size) == (8, 8)
    assert parsed("model.global_batch_size=6", DPORunConfig).model.micro_batch_size == 6
    with pytest.raises(ConfigError, match=r"num_rollout_samples=64 is not a multiple of .*=128"):
        parsed("model.rs.num_rollouts_per_prompt=128", RSRunConfig)


def test_micro_batches_do_not_cut_pairs():
    """Two data-parallel ranks would get 3 rows each, or begin a micro-batch within a pair."""
    group = SimpleNamespace(sharding_annotations=NamedSharding(range(2), ["data_parallel"]))
    for rows, micro_batch in ((6, 2), (8, 3)):
        check_whole_groups(group, rows, micro_batch, 1)
        with pytest.raises(ConfigError, match=r"2 adjacent rows .*global_batch_size"):
            check_whole_groups(group, rows, micro_batch, 2)


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"label_smoothing": 0.1, "sft_weight": 0.5}, DPOLoss(0.1, 0.5, label_smoothing=0.1)),
        ({"loss": "ipo", "beta": 0.3, "average_logprobs": True}, IPOLoss(0.3, 0.0, True)),
        (
            {"loss": "rpo", "distance": "square", "reward_scale": 2},
            RPOLoss(distance="square", reward_scale=2.0),
        ),
        ({"loss": "simpo", "target_margin": 0.4}, SimPOLoss(beta=2.0, target_margin=0.4)),
        ({"loss": "kto", "undesirable_weight": 0.5}, KTOLoss(0.1, 1.0, 0.5)),
    ],
)
def test_options_reach_the_preference_loss(options, loss):
    config = parsed({f"trainer.dpo.{key}": value for key, value in options.items()}, DPORunConfig)
    assert preference_loss(config.trainer.dpo) == loss


def test_data_may_differ_if_changes_of_data_or_seed_are_accepted():
    for changed, expected in (("seed", True), ("data.shuffle", True), ("model.optim", False)):
        assert ExpManagerConfig(resume_changed=(changed,)).data_may_change is expected
    assert not ExpManagerConfig().data_may_change


@pytest.mark.integration
def test_a_missing_checkpoint_is_named_by_its_key(tiny_nemo):
    from aligner.models.value.workers.megatron_value_worker import MegatronValueWorkerImpl

    paths = {"critic.restore_from_path": "nope.nemo", "model.restore_from_path": str(tiny_nemo)}
    config = parsed(paths)
    with pytest.raises(CheckpointNotFoundError, match=r"nope.*. Check critic\.restore_from_path"):
        MegatronValueWorkerImpl(config.critic, None, model=config.model)
    distill = parsed("teacher.restore_from_path=nope.nemo", DistillRunConfig)
    with pytest.raises(CheckpointNotFoundError, match=r"nope.*. Check teacher\.restore_from_path"):
        check_teacher(distill, None)


SIZES = {"hidden_size": 192, "ffn_hidden_size": 192, "num_attention_heads": 9}
DENSE = dataclasses.replace(TINY_ARCHITECTURE, num_layers=6, num_query_groups=3, **SIZES)
MOE = dataclasses.replace(DENSE, num_moe_experts=6, moe_ffn_hidden_size=64)


@pytest.mark.parametrize(
    ("architecture", "parallel", "world", "words"),
    [
        (DENSE, ParallelConfig(tensor=2), 2, ["9 attention heads", "3 query groups", "1, 3"]),
        (DENSE, ParallelConfig(pipeline=4), 4, ["6 layers", "3", "2, 3, 6"]),
        (DENSE, ParallelConfig(tensor=3), 4, ["4 processes", "3", "3 or 6"]),
        (DENSE, ParallelConfig(tensor=3), 2, ["2 processes", "Start 3"]),
        (DENSE, ParallelConfig(sequence_parallel=True), 1, ["model.sequence_parallel=true"]),
        (DENSE, ParallelConfig(expert=2), 2, ["no experts"]),
        (DENSE, ParallelConfig(first_stage=2), 1, ["first_pipeline_stage=2", "4 of 6 layers"]),
        (DENSE, ParallelConfig(pipeline=3, first_stage=3), 3, ["3 of 6 layers", "2 other stages"]),
        (DENSE, ParallelConfig(pipeline=2, first_stage=6), 2, ["0 of 6 layers", "1 other stages"]),
        (DENSE, ParallelConfig(pipeline=2, first_stage=2, last_stage=3), 2, ["1 of 6 layers"]),
        (DENSE, ParallelConfig(), 5, None),
        (DENSE, ParallelConfig(tensor=3, sequence_parallel=True), 6, None),
        (DENSE, ParallelConfig(tensor=3, pipeline=2), 6, None),
        (DENSE, ParallelConfig(pipeline=2, last_stage=1), 2, None),
        (DENSE, ParallelConfig(pipeline=4, first_stage=1, last_stage=1), 4, None),
        (DENSE, ParallelConfig(pipeline=2, first_stage=2, last_stage=4), 2, None),
        (MOE, ParallelConfig(expert=3), 3, None),
        (MOE, ParallelConfig(expert=4), 4, ["6 experts"]),
        (MOE, ParallelConfig(tensor=3, expert=3, sequence_parallel=True), 3, None),
        (MOE, ParallelConfig(tensor=3, sequence_parallel=True), 3, ["64 expert columns"]),
        (
            dataclasses.replace(MOE, bias_linear=True),
            ParallelConfig(tensor=2, sequence_parallel=True),
            2,
            ["does not split experts with biases", "model.expert_model_parallel_size"],
        ),
        (MOE, ParallelConfig(tensor=3, expert=3), 3, ["Set model.sequence_parallel=true"]),
    ],
)
def test_impossible_layouts_are_refused_with_numbers(architecture, parallel, world, words):
    if words is None:
        check_layout(architecture, parallel, world)
        return
    with pytest.raises(LayoutError) as caught:
        check_layout(architecture, parallel, world)
    for word in words:
        assert word in str(caught.value)


def test_a_critic_has_the_policys_sizes_and_its_own_pipeline_equal_stages():
    policy = ModelConfig(
        "m.nemo", pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1
    )
    assert CriticConfig().with_layout(policy).parallel.first_stage == 1
    own = CriticConfig(pipeline_model_parallel_size=3).with_layout(policy).parallel
    assert (own.pipeline, own.first_stage) == (3, None)
    # Sizes that are null are the policy's.
    assert parsed("trainer.devices=2").value_parallel == ParallelConfig()
    shared = parsed("trainer.devices=4 model.tensor_model_parallel_size=2")
    assert shared.value_parallel == shared.model.parallel == ParallelConfig(tensor=2)
    # One data-parallel rank of the critic has twice the rows of the policy's two.
    own = parsed(" ".join([*RAY, "model.global_batch_size=8", "critic.global_batch_size=8"]))
    assert (own.model.parallel, own.value_parallel) == (ParallelConfig(), ParallelConfig(tensor=2))
    assert (own.model.micro_batch_size, own.critic.micro_batch_size) == (4, 8)
    model = ModelConfig("m", pipeline_model_parallel_size=2)
    laid_out = CriticConfig(tensor_model_parallel_size=4, sequence_parallel=True).with_layout(model)
    assert laid_out.parallel == ParallelConfig(tensor=4, pipeline=2, sequence_parallel=True)
    adapted = parsed(" ".join([*RAY, LORA]))
    critic = critic_settings(adapted.critic, adapted.model, RunSettings())
    assert (critic.lora, critic.parallel.tensor) == (adapted.model.peft.lora, 2)


LORA = "model.peft.peft_scheme=lora"


def test_adapters_of_policy_and_critic_and_of_a_continued_run():
    assert parsed().model.peft == PeftConfig()
    all_weights = policy_settings(parsed().model, RunSettings())
    assert all_weights.lora is None
    settings = policy_settings(parsed(LORA).model, RunSettings())
    continued, whole = settings_to_continue(settings, "/run/policy.nemo")
    assert (continued.adapters_path, whole) == ("/run/policy.lora.safetensors", None)
    assert settings_to_continue(all_weights, "/run/policy.nemo") == (
        all_weights,
        "/run/policy.nemo",
    )
    # The critic has the policy's adapters and begins with the same file.
    peft = f"{LORA} model.peft.restore_from_path=p.lora.safetensors"
    config = parsed(peft)
    policy = policy_settings(config.model, RunSettings())
    critic = critic_settings(config.critic, config.model, RunSettings())
    assert policy.lora == critic.lora == config.model.peft.lora_tuning
    assert policy.adapters_path == critic.adapters_path == "p.lora.safetensors"
    other = parsed(f"{peft} critic.restore_from_path=c.nemo")
    assert critic_settings(other.critic, other.model, RunSettings()).adapters_path is None
    # Adapters larger than the model.
    with pytest.raises(ConfigError, match=r"adapter_dim=1000000000 exceeds both .*linear_qkv"):
        adapter_shapes(TINY_ARCHITECTURE, LoraConfig(adapter_dim=10**9))
    assert adapter_shapes(TINY_ARCHITECTURE, LoraConfig(adapter_dim=32))


RAY = ["cluster.engine=ray", "trainer.devices=2", "critic.tensor_model_parallel_size=2"]


@pytest.mark.integration
def test_a_size_that_does_not_divide_the_architecture_names_the_critic(tiny_nemo):
    from aligner.algorithms.run.run import check_roles
    from aligner.algorithms.run.startup import describe_model

    sizes = ["trainer.devices=3", "critic.tensor_model_parallel_size=3", "cluster.engine=ray"]
    sizes += ["model.ppo.num_rollout_samples=12", f"model.restore_from_path={tiny_nemo}"]
    sizes += [f"{role}.global_batch_size=12" for role in ("model", "critic")]
    sizes += [f"{role}.micro_batch_size=4" for role in ("model", "critic")]
    odd = load_config(composed("ppo_tiny_cpu", *sizes))
    _, architecture = describe_model(odd.model)
    with pytest.raises(LayoutError, match=r"critic\.tensor_model_parallel"):
        check_roles(odd, architecture, (3, 3))
