"""A layout of the critic's own: what is refused where, and the numbers on Ray."""

import pytest
from recipes import composed

from aligner.algorithms.run.engine import Clusters
from aligner.config import CriticConfig, ModelConfig, ParallelConfig, load_config
from aligner.errors import ConfigError, LayoutError
from aligner.models.gpt.role.settings import RunSettings, critic_settings, policy_settings

OWN = ["critic.tensor_model_parallel_size=2"]
RAY = ["cluster.engine=ray", "trainer.devices=2"]


def config(*overrides):
    return load_config(composed("ppo_tiny_cpu", *overrides))


def test_sizes_that_are_not_given_are_the_policys():
    assert config("trainer.devices=2").value_parallel == ParallelConfig()
    shared = config("trainer.devices=4", "model.tensor_model_parallel_size=2")
    assert shared.value_parallel == shared.model.parallel == ParallelConfig(tensor=2)
    own = config(*RAY, *OWN)
    assert own.value_parallel == ParallelConfig(tensor=2)
    assert own.model.parallel == ParallelConfig()
    model = ModelConfig(restore_from_path="m", pipeline_model_parallel_size=2)
    laid_out = CriticConfig(tensor_model_parallel_size=4, sequence_parallel=True).with_layout(model)
    assert laid_out.parallel == ParallelConfig(tensor=4, pipeline=2, sequence_parallel=True)
    assert CriticConfig().with_layout(model) is model


def test_batches_that_are_not_given_follow_the_critics_ranks():
    """One data-parallel rank of the critic has twice the rows of the policy's two."""
    null = ["model.micro_batch_size=null", "critic.micro_batch_size=null"]
    sizes = ["model.global_batch_size=8", "critic.global_batch_size=8"]
    both = config(*RAY, *OWN, *null, *sizes)
    assert (both.model.micro_batch_size, both.critic.micro_batch_size) == (4, 8)


def test_a_critic_with_adapters_has_them_in_its_own_layout():
    """Adapters are the policy's; how they are split is the critic's (`test_lora_layouts`)."""
    lora = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]
    both = config(*RAY, *OWN, *lora)
    run = RunSettings()
    critic, policy = critic_settings(both.critic, both.model, run), policy_settings(both.model, run)
    assert critic.lora == policy.lora == both.model.peft.lora
    assert critic.lora is not None
    assert (critic.parallel.tensor, policy.parallel.tensor) == (2, 1)


def test_the_report_says_both_layouts():
    class Room:
        def world_size(self):
            return 2

    words = Clusters.shared(Room()).describe(config(*RAY, *OWN))
    assert words == "2 processes (data 2), critic 2 processes (tensor 2)"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["trainer.devices=2", *OWN],
            r"critic\.tensor_model_parallel_size=2: with cluster.engine=local .*engine=ray",
        ),
        (
            ["cluster.engine=ray", *OWN],
            r"trainer.devices x trainer.num_nodes=1 is not a multiple of .* = 2, the "
            "critic's layout. Use 2",
        ),
        (
            [*RAY, *OWN, "cluster.colocated=false", "cluster.value_workers=3"],
            r"cluster.value_workers=3 is not a multiple of .* the critic's layout. Use 4",
        ),
        (
            [*RAY, "critic.context_parallel_size=2", "policy.backend=dtensor"],
            r"critic\.context_parallel_size=2: policy.backend=dtensor .*policy.backend=megatron",
        ),
        (
            [
                *RAY,
                *OWN,
                "reward=model",
                "reward.model.restore_from_path=r.nemo",
                "reward.model.share_body_with_critic=true",
            ],
            r"share_body_with_critic=true needs a critic in the policy's layout",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides, words):
    with pytest.raises(ConfigError, match=words):
        config(*overrides)


def test_a_policy_of_transformers_says_what_to_use_for_long_sequences():
    with pytest.raises(ConfigError) as caught:
        config("trainer.devices=2", "model.context_parallel_size=2", "policy.backend=dtensor")
    for word in (
        "model.context_parallel_size=2",
        "tensor_model_parallel_size",
        "activations_checkpoint_granularity=full",
        "or policy.backend=megatron",
    ):
        assert word in str(caught.value)


def test_a_size_that_the_architecture_does_not_divide_by_names_the_critic(tiny_nemo):
    from aligner.algorithms.run.run import check_roles
    from aligner.algorithms.run.startup import describe_model

    odd = config(
        f"model.restore_from_path={tiny_nemo}",
        "cluster.engine=ray",
        "trainer.devices=3",
        "critic.tensor_model_parallel_size=3",
        "model.global_batch_size=12",
        "critic.global_batch_size=12",
        "model.micro_batch_size=4",
        "critic.micro_batch_size=4",
        "model.ppo.num_rollout_samples=12",
    )
    _, architecture = describe_model(odd.model)
    with pytest.raises(LayoutError, match=r"critic\.tensor_model_parallel"):
        check_roles(odd, architecture, (3, 3))
