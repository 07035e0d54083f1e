"""`Policy` and `Value` as NeMo-RL publishes them: mappings, arguments, columns and results."""

import gc
import warnings

import numpy as np
import pytest
import torch
from batches import ppo_batch
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

from aligner.algorithms.losses.policy import PPOPolicyLoss
from aligner.algorithms.losses.value import PPOValueLoss
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config.translation.nemo_rl import published_role
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.named_sharding import AXES, NamedSharding
from aligner.distributed.workers import LocalCluster, LocalFuture
from aligner.errors import ConfigError, DataError, LayoutError
from aligner.foreign_keys import IGNORED
from aligner.models.policy import PolicyConfig
from aligner.models.policy.lm_policy import Policy
from aligner.models.policy.workers.megatron_policy_worker import MegatronPolicyWorker
from aligner.models.value import ValueConfig
from aligner.models.value.lm_value import Value
from aligner.models.value.workers.megatron_value_worker import MegatronValueWorker
from aligner.parallel.groups import initialize_parallel

MEGATRON = {
    "enabled": True,
    "env_vars": {"ALIGNER_PUBLISHED": 1},
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "optimizer": {"optimizer": "adam", "lr": 1e-3, "min_lr": 1e-3, "clip_grad": 0.5},
    "scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 0},
}
DTENSOR = {"enabled": True, "tensor_parallel_size": 1, "context_parallel_size": 1}
SIZES = {"train_global_batch_size": 4, "train_micro_batch_size": 2, "logprob_batch_size": 4}
INFERENCE = {"init_optimizer": False, "init_reference_model": False}
OFF = {"dynamic_batching": {"enabled": False}, "sequence_packing": {"enabled": False}}


def policy_config(path="m.nemo", **changes) -> PolicyConfig:
    return {
        "model_name": str(path),
        "tokenizer": {"name": str(path)},
        "precision": "float32",
        **SIZES,
        **OFF,
        "megatron_cfg": MEGATRON,
        "dtensor_cfg": {"enabled": False},
        "generation": {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "pad_token_id": 7},
        **changes,
    }


def value_config(path="m.nemo", **changes) -> ValueConfig:
    config = policy_config(path, **changes)
    del config["generation"]
    return {**config, "reward_model_cfg": {"enabled": True, "reward_model_type": "regression"}}


@pytest.fixture(scope="module")
def tokenizer(tiny_nemo):
    with open_nemo(tiny_nemo) as checkpoint:
        return checkpoint.tokenizer


@pytest.fixture(scope="module")
def cluster():
    return LocalCluster(initialize_parallel())


@pytest.fixture(scope="module")
def policy(tiny_nemo, tokenizer, cluster):
    return Policy(cluster, policy_config(tiny_nemo), tokenizer)


@pytest.fixture(scope="module")
def value(tiny_nemo, tokenizer, cluster):
    return Value(cluster, value_config(tiny_nemo), tokenizer, "lm_value")


def prompts():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 200, (4, 5), generator=generator)
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([5, 3, 4, 5])})


def trained_batch():
    return BatchedDataDict({**ppo_batch([5, 3, 4, 5], [2] * 4), **prompts()})


# Mappings ----------------------------------------------------------------------------------------


def test_a_mapping_becomes_our_sections():
    role = published_role(
        policy_config(
            precision="bfloat16",
            max_grad_norm=None,
            dynamic_batching={"enabled": True, "train_mb_tokens": 64, "sequence_length_round": 4},
            generation_batch_size=3,
            generation={"max_new_tokens": 9, "temperature": 0.5, "top_k": None, "top_p": 0.9},
            megatron_cfg={**MEGATRON, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        )
    )
    model = role.model
    assert (role.backend, role.precision, role.gradient_clip_val) == ("megatron", "bf16", 0.0)
    assert role.env_vars == {"ALIGNER_PUBLISHED": "1"}
    assert (model.micro_batch_size, model.global_batch_size) == (2, 4)
    assert (model.parallel.tensor, model.parallel.sequence_parallel) == (2, True)
    assert model.token_budgets.train_mb_tokens == 64
    assert model.dynamic_batching.sequence_length_round == 4
    assert (model.optim.lr, model.optim.sched.name) == (1e-3, "constant")
    rollout = model.rollout
    assert (rollout.rollout_micro_batch_size, rollout.forward_micro_batch_size) == (3, 4)
    assert (rollout.length_params.max_length, rollout.sampling_params.temperature) == (9, 0.5)
    assert (rollout.sampling_params.top_k, rollout.sampling_params.top_p) == (0, 0.9)
    on_dtensor = published_role(
        policy_config(
            megatron_cfg={"enabled": False},
            dtensor_cfg={**DTENSOR, "tensor_parallel_size": 2, "env_vars": {"A": "b"}},
            optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 5e-6, "betas": [0.9, 0.99]}},
            max_grad_norm=2.0,
        )
    )
    assert (on_dtensor.backend, on_dtensor.model.parallel.tensor) == ("dtensor", 2)
    assert (on_dtensor.model.optim.lr, on_dtensor.model.optim.betas) == (5e-6, (0.9, 0.99))
    assert (on_dtensor.gradient_clip_val, on_dtensor.env_vars) == (2.0, {"A": "b"})


def test_omegaconf_is_read_as_a_mapping_too():
    assert published_role(OmegaConf.create(policy_config())) == published_role(policy_config())


def test_keys_that_tune_another_engine_are_named_in_a_warning():
    config = policy_config(megatron_cfg={**MEGATRON, "apply_rope_fusion": True})
    with pytest.warns(UserWarning, match=r"policy\.megatron_cfg\.apply_rope_fusion"):
        assert published_role(config) == published_role(policy_config())
    assert "policy.megatron_cfg.apply_rope_fusion" in IGNORED  # for the start-up report
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published_role(policy_config())


# Arguments ---------------------------------------------------------------------------------------


class Clusters:
    """Writes down what is asked for."""

    def start_workers(self, worker_class, name_prefix, **kwargs):
        self.started = (worker_class, name_prefix, kwargs)
        return self

    def shutdown(self, cleanup_method=None):
        raise RuntimeError("cannot end")

    sharding_annotations = NamedSharding(np.arange(2).reshape(1, 2, 1, 1), AXES)


def test_published_arguments_reach_the_cluster(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = Clusters()
    Policy(asked, policy_config(), tokenizer, "mine", [2, 1], False, "w.nemo", "opt", False)
    worker, name, given = asked.started
    assert worker.endswith("lm_policy.MegatronPolicyWorker")
    assert (name, given["workers_per_node"]) == ("mine", [2, 1])
    assert given["env_vars"] == {"ALIGNER_PUBLISHED": "1"}
    assert given["parallel"].tensor == 1
    assert (given["init_optimizer"], given["init_reference_model"]) == (False, False)
    assert given["weights_path"] == str(tmp_path / "w.nemo")
    assert given["optimizer_path"] == str(tmp_path / "opt")
    assert given["run"].gradient_clip_val == 0.5
    dtensor = value_config(megatron_cfg={"enabled": False}, dtensor_cfg=DTENSOR)
    Value(asked, dtensor, tokenizer, "mine", 1, False, tmp_path / "w.nemo")
    worker, name, given = asked.started
    assert worker.endswith("DTensorValueWorkerV2")
    assert (name, given["workers_per_node"], given["init_optimizer"]) == ("mine", 1, False)
    assert given["weights_path"] == str(tmp_path / "w.nemo")


def test_shutdown_that_fails_is_false_and_a_front_forgotten_ends_its_workers(tokenizer):
    asked, ended = Clusters(), []
    assert Policy(asked, policy_config(), tokenizer).shutdown() is False
    policy = Policy(asked, policy_config(), tokenizer)
    asked.shutdown = lambda cleanup_method=None: ended.append(cleanup_method)
    del policy
    gc.collect()
    assert ended == [None]
    with pytest.raises(ConfigError):
        Policy(asked, {}, tokenizer)  # never had workers: nothing to end
    gc.collect()
    assert ended == [None]


def test_the_local_cluster_has_one_layout(cluster, tiny_nemo, tokenizer):
    other = policy_config(tiny_nemo, megatron_cfg={**MEGATRON, "tensor_model_parallel_size": 2})
    with pytest.raises(LayoutError, match=r"tensor=2.*layout of the processes.*tensor=1"):
        Policy(cluster, other, tokenizer)
    with pytest.raises(ConfigError, match="workers_per_node=3"):
        Policy(cluster, policy_config(tiny_nemo), tokenizer, workers_per_node=3)


# Columns and results -----------------------------------------------------------------------------


def test_generate_needs_ids_and_lengths_alone(policy):
    assert policy.cfg["train_global_batch_size"] == 4
    greedy = [policy.generate(prompts(), greedy=True)["output_ids"] for _ in range(2)]
    assert torch.equal(*greedy)
    first, second = (policy.generate(prompts()) for _ in range(2))
    assert not torch.equal(first["logprobs"], second["logprobs"])
    output, data = first["output_ids"], prompts()
    for row, length in enumerate(data["input_lengths"].tolist()):
        assert torch.equal(output[row, :length], data["input_ids"][row, :length])
    lengths = first["unpadded_sequence_lengths"]
    assert torch.equal(lengths, data["input_lengths"] + first["generation_lengths"])
    beyond = torch.arange(output.shape[1]) >= lengths[:, None]
    assert beyond.any()
    assert (output[beyond] == 7).all()  # generation.pad_token_id


def test_a_worker_needs_ids_and_lengths_alone_too(policy):
    worker = policy.worker_group.worker
    with pytest.raises(DataError, match="input_lengths: required"):
        worker.generate(BatchedDataDict({"input_ids": prompts()["input_ids"]}))
    numbered = BatchedDataDict({**prompts(), "sample_ids": torch.arange(4)})
    first, *others = (worker.generate(data, seed=3) for data in (prompts(), prompts(), numbered))
    assert all(torch.equal(first["output_ids"], output["output_ids"]) for output in others)
    assert not torch.equal(first["logprobs"], worker.generate(prompts())["logprobs"])


def test_draws_come_again_from_the_run_s_seed(tiny_nemo, tokenizer, cluster):
    runs = []
    for _ in range(2):
        again = Policy(cluster, policy_config(tiny_nemo), tokenizer, **INFERENCE)
        runs.append([again.generate(prompts())["output_ids"] for _ in range(2)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_scores_need_ids_and_lengths_alone(policy, value):
    data = prompts()
    logprobs = policy.get_logprobs(data)["logprobs"]
    inside = torch.arange(5) < data["input_lengths"][:, None]
    assert logprobs.shape == (4, 5)
    assert (logprobs[:, 0] == 0).all()
    assert (logprobs[:, 1:][inside[:, 1:]] < 0).all()
    assert (logprobs[~inside] == 0).all()
    reference = policy.get_reference_policy_logprobs(data, micro_batch_size=1)
    torch.testing.assert_close(reference["reference_logprobs"], logprobs)
    masked = BatchedDataDict({**data, "token_mask": torch.zeros(4, 5)})
    assert (policy.get_logprobs(masked)["logprobs"] == 0).all()
    values = value.get_values(data)["values"]
    assert values.shape == (4, 5)
    assert torch.equal(value.get_values(trained_batch(), 1)["values"], values)


def test_a_wrong_batch_is_refused_by_name(policy, value):
    with pytest.raises(DataError, match=r"data is a dict.*BatchedDataDict"):
        policy.generate(dict(prompts()))
    for ask in (policy.generate, policy.get_logprobs, value.get_values):
        with pytest.raises(DataError, match="input_lengths: required"):
            ask(BatchedDataDict({"input_ids": torch.ones(2, 3, dtype=torch.long)}))
    with pytest.raises(DataError, match="token_mask, sample_mask: required"):
        policy.train(prompts(), PPOPolicyLoss())


def test_a_policy_without_generation_does_not_generate(tokenizer):
    policy = Policy(Clusters(), policy_config(generation=None), tokenizer)
    with pytest.raises(ConfigError, match=r"policy\.generation"):
        policy.generate(prompts())
    with pytest.raises(ConfigError, match=r"stop_token_ids=.9999."):
        Policy(Clusters(), policy_config(generation={"stop_token_ids": [9999]}), tokenizer)
    batching = {"enabled": True, "train_mb_tokens": 64}
    both = policy_config(dynamic_batching=batching, sequence_packing=batching)
    with pytest.raises(ConfigError, match="exclude each other"):
        Policy(Clusters(), both, tokenizer)


def test_an_output_that_lacks_a_column_is_a_value_error(policy, monkeypatch):
    group = policy.worker_group
    part = BatchedDataDict({"output_ids": torch.ones(4, 6, dtype=torch.long)})
    monkeypatch.setattr(
        group, "run_all_workers_sharded_data", lambda *args, **kwargs: LocalFuture([part])
    )
    with pytest.raises(ValueError, match="generation_lengths, unpadded_sequence_lengths"):
        policy.generate(prompts())


def test_train_returns_the_published_keys(policy, value):
    policy.prepare_for_training()
    value.prepare_for_training()
    for handle, loss in ((policy, PPOPolicyLoss()), (value, PPOValueLoss(None))):
        result = handle.train(trained_batch(), loss)
        assert {"loss", "grad_norm", "all_mb_metrics"} <= result.keys()
        assert result["all_mb_metrics"]["loss"] == [result["loss"]]
        assert result["grad_norm"] > 0


def test_stop_tokens_end_a_response_too(tiny_nemo, tokenizer, cluster):
    """The first token of a response ends it, if this token is a stop token."""
    untrained = Policy(cluster, policy_config(tiny_nemo), tokenizer, **INFERENCE)
    first = untrained.generate(prompts(), greedy=True)
    row, length = first["output_ids"][0], prompts()["input_lengths"][0]
    assert first["generation_lengths"][0] > 1
    stop = {"max_new_tokens": 6, "stop_token_ids": [int(row[length]), tokenizer.eos_id]}
    stopped = Policy(cluster, policy_config(tiny_nemo, generation=stop), tokenizer, **INFERENCE)
    assert stopped.tokenizer.end_ids == (tokenizer.eos_id, int(row[length]))
    output = stopped.generate(prompts(), greedy=True)
    assert output["generation_lengths"][0] == 1
    assert output["is_end"][0]


def test_packing_takes_the_published_extra_keys():
    args = {
        **{"train_mb_tokens": 8, "logprob_mb_tokens": None, "algorithm": "first_fit_decreasing"},
        **{"input_key": "input_ids", "input_lengths_key": "input_lengths"},
        **{"sequence_length_pad_multiple": 1, "max_tokens_per_microbatch": 8},
    }
    shards, order = prompts().shard_by_batch_size(2, batch_size=4, sequence_packing_args=args)
    assert [shard.size for shard in shards] == [2, 2]
    assert sorted(order) == [0, 1, 2, 3]


# Workers -----------------------------------------------------------------------------------------


def test_workers_take_published_arguments(tiny_nemo, tokenizer, tmp_path):
    place = NamedSharding(np.arange(1).reshape(1, 1, 1, 1), AXES)
    with pytest.warns(UserWarning, match="pre_init_communication_queue"):
        worker = MegatronPolicyWorker(
            policy_config(tiny_nemo),
            tokenizer,
            **INFERENCE,
            worker_sharding_annotations=place,
            pre_init_communication_queue=object(),
        )
    assert repr(worker) == "MegatronPolicyWorker[rank=0/1]"
    assert worker.get_logprobs(BatchedDataDict({**trained_batch()}))["logprobs"].shape == (4, 5)
    critic = MegatronValueWorker(
        value_config(tiny_nemo), tokenizer, None, None, False, worker_sharding_annotations=place
    )
    assert repr(critic) == "MegatronValueWorker[rank=0/1]"
    assert critic.get_values(prompts())["values"].shape == (4, 5)
    with pytest.warns(UserWarning, match="save_checkpoint: not used here: checkpointing_cfg"):
        critic.save_checkpoint(str(tmp_path / "value.nemo"), checkpointing_cfg={})
    assert (tmp_path / "value.nemo").exists()
    pair = NamedSharding(np.arange(2).reshape(1, 1, 1, 2), AXES)
    with pytest.raises(LayoutError, match=r"tensor_parallel=2.* has 1"):
        MegatronValueWorker(value_config(), tokenizer, worker_sharding_annotations=pair)


def test_a_tokenizer_of_transformers_is_converted(tokenizer):
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, eos_token="</s>")
    policy = Policy(Clusters(), policy_config(), theirs)
    assert policy.tokenizer.encode("a b") == tokenizer.encode("a b")
    assert policy.tokenizer.eos_id == theirs.eos_token_id
