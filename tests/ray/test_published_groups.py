"""Worker groups on Ray as NeMo-RL publishes them: builders, environment, handles, futures."""

import numpy as np
import pytest
from batches import ppo_batch
from ray_workers import TELLER, Teller

from aligner.algorithms.losses.policy import PPOPolicyLoss
from aligner.algorithms.losses.value import MseValueLossFn
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.named_sharding import AXES, NamedSharding
from aligner.distributed.ray.worker import WorkerFailure
from aligner.distributed.virtual_cluster import RayVirtualCluster
from aligner.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from aligner.errors import ConfigError, DataError, LayoutError
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value

pytestmark = pytest.mark.ray
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
MEGATRON = {"enabled": True, **dict.fromkeys(SIZES, 1)}
OFF = {key: {"enabled": False} for key in ("dtensor_cfg", "dynamic_batching", "sequence_packing")}


def value_config(path, **megatron):
    return {
        "model_name": str(path),
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "megatron_cfg": {**MEGATRON, **megatron},
        **OFF,
    }


def policy_config(path, **megatron):
    generation = {"max_new_tokens": 4, "temperature": 1.0, "pad_token_id": 0}
    return {**value_config(path, **megatron), "generation": generation}


def trained_batch():
    return BatchedDataDict(ppo_batch([5, 3, 4, 5], [1] * 4))


def prompts():
    batch = trained_batch()
    return BatchedDataDict({name: batch[name] for name in ("input_ids", "input_lengths")})


@pytest.fixture
def cluster(ray):
    cluster = RayVirtualCluster([2], max_colocated_worker_groups=2, timeout_s=280)
    yield cluster
    cluster.shutdown()


def test_builders_environment_and_workers_per_node(cluster, monkeypatch):
    pair = NamedSharding(layout=np.arange(2), names=["data_parallel"])
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(Teller, 10, fail=False),  # a class, and an argument by position
        name_prefix="teller",
        workers_per_node=[2],
        sharding_annotations=pair,
        env_vars={"ANOTHER_PYTHON": "from env_vars"},
    )
    places = group.get_all_worker_results(group.run_all_workers_single_data("place"))
    assert [place["ANOTHER_PYTHON"] for place in places] == ["from env_vars"] * 2
    assert group.run_single_worker_single_data("echo", data=[1, 2]).get_results() == [(0, [10, 20])]
    one = RayWorkerGroup(cluster, RayWorkerBuilder(TELLER), "one", workers_per_node=1)
    assert len(one.workers) == 1
    for wrong in (3, [1, 1], 0):
        with pytest.raises(ConfigError, match=r"workers_per_node=.*\[2\] bundles"):
            RayWorkerGroup(cluster, RayWorkerBuilder(TELLER), "many", workers_per_node=wrong)


def test_workers_are_called_one_by_one_and_futures_are_lists(cluster, ray):
    group = RayWorkerGroup(cluster, RayWorkerBuilder(TELLER, factor=2), "teller")
    answers = ray.get([worker.echo.remote([3], plus=1) for worker in group.workers])
    assert answers == [(0, [7]), (1, [7])]
    futures = group.run_all_workers_single_data("echo")
    assert isinstance(futures, list)
    assert ray.get(futures) == futures.get_results() == [(0, None), (1, None)]
    with pytest.raises(WorkerFailure, match="row 7 is empty"):
        ray.get(group.workers[0].refuse.remote(error=DataError("row 7 is empty")))
    with pytest.raises(WorkerFailure, match="KeyError: 'nowhere'"):
        ray.get(group.run_all_workers_single_data("stumble"))
    assert str(group.workers[1]).startswith("teller rank 1 (")


@pytest.fixture
def tokenizer(tiny_nemo):
    with open_nemo(tiny_nemo) as checkpoint:
        return checkpoint.tokenizer


@pytest.mark.ray_heavy
def test_policy_and_value_with_layouts_of_their_own(cluster, ray, tiny_nemo, tokenizer):
    """As written: a cluster that knows no layout, mappings that do; the critic has another one."""
    pair = {"tensor_model_parallel_size": 2, "env_vars": {"ALIGNER_PUBLISHED": "ray"}}
    with pytest.raises(LayoutError, match=r"2 workers .* tensor 4"):
        Policy(cluster, policy_config(tiny_nemo, tensor_model_parallel_size=4), tokenizer)
    policy = Policy(cluster, policy_config(tiny_nemo, **pair), tokenizer)
    value = Value(cluster, value_config(tiny_nemo), tokenizer)
    sizes = [handle.sharding_annotations.shape for handle in (policy, value)]
    assert [size["tensor_parallel"] for size in sizes] == [2, 1]
    assert [size["data_parallel"] for size in sizes] == [1, 2]
    assert policy.get_logprobs(prompts())["logprobs"].shape == (4, 5)
    assert policy.generate(prompts(), greedy=True)["output_ids"].shape[0] == 4
    value.prepare_for_training()
    assert value.train(trained_batch(), MseValueLossFn())["loss"] > 0

    def mean_square(logits, data, global_valid_seqs, global_valid_toks):
        return (logits.square() * data["token_mask"]).sum() / global_valid_toks, {}

    assert value.train(trained_batch(), mean_square)["loss"] >= 0
    names = [key for keys in policy.prepare_weights_for_ipc(1) for key in keys]
    workers = policy.worker_group.workers
    offers = ray.get([each.get_weights_ipc_handles.remote(keys=names[:1]) for each in workers])
    assert len(offers) == 2
    policy.offload_after_refit()
    assert policy.shutdown()
    del policy
    again = Policy(  # the room of the one that has ended
        cluster, policy_config(tiny_nemo, **pair), tokenizer, init_optimizer=False
    )
    del again  # ends its workers, for the fixture finds none left


def run(group, method, data, **common):
    """Results of the data-parallel ranks."""
    replicated = ["context_parallel", "tensor_parallel", "pipeline_parallel"]
    ranks = group.sharding_annotations.get_axis_size("data_parallel")
    future = group.run_all_workers_sharded_data(
        method,
        data=data.shard_by_batch_size(ranks, batch_size=None),
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=replicated,
        output_is_replicated=replicated,
        common_kwargs=common,
    )
    return group.get_all_worker_results(future)


def group_of(cluster, worker, shape, config, name, **options):
    """A group as NeMo-RL makes it: a builder by the worker's path, and names of all axes."""
    places = NamedSharding(layout=np.arange(2).reshape(shape), names=AXES)
    options |= {"worker_sharding_annotations": places}
    builder = RayWorkerBuilder(f"aligner.models.{worker}", config, **options)
    return RayWorkerGroup(
        *(cluster, builder, name), workers_per_node=2, sharding_annotations=places, env_vars={}
    )


@pytest.mark.ray_heavy
def test_a_published_builder_makes_a_training_group(cluster, tiny_nemo, tokenizer):
    config = value_config(tiny_nemo, tensor_model_parallel_size=2)
    options = {"tokenizer": tokenizer, "init_optimizer": True}
    options |= {"weights_path": None, "optimizer_path": None}
    worker = "value.workers.megatron_value_worker.MegatronValueWorker"
    group = group_of(cluster, worker, (1, 1, 1, 2), config, "lm_value", **options)
    (result,) = run(group, "get_values", prompts())
    assert result["values"].shape == (4, 5)
    assert group.shutdown(cleanup_method="shutdown")


@pytest.mark.ray_heavy
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_front_of_ones_own_on_published_workers(
    cluster, ray, tiny_nemo, tokenizer, tmp_path, backend
):
    """As NeMo-RL's `Policy` has it: shards, calls by name, no ``sample_ids``."""
    layout = {"tensor_parallel_size": 1, "context_parallel_size": 1}
    config = policy_config(tiny_nemo)
    config["megatron_cfg"]["enabled"] = backend == "megatron"
    config["dtensor_cfg"] = {"enabled": backend == "dtensor", **layout}
    name = {"megatron": "MegatronPolicyWorker", "dtensor": "DTensorPolicyWorker"}[backend]
    worker = f"policy.{backend}_policy_worker.{name}"
    options = {"init_reference_model": False, "pre_init_communication_queue": None}
    group = group_of(
        *(cluster, worker, (1, 2, 1, 1), config, "lm_policy"), tokenizer=tokenizer, **options
    )

    def tokens(**common):
        parts = run(group, "generate", prompts(), greedy=False, **common)
        return [row for part in parts for row in part["output_ids"].tolist()]

    with pytest.raises(DataError, match="input_lengths"):
        run(group, "generate", BatchedDataDict({"input_ids": prompts()["input_ids"]}))
    assert tokens() != tokens()
    assert tokens(seed=3) == tokens(seed=3)
    parts = run(group, "get_logprobs", prompts())
    assert [part["logprobs"].shape for part in parts] == [(2, 5)] * 2
    ray.get(group.run_all_workers_single_data("prepare_for_training"))
    results = run(group, "train", trained_batch(), loss_fn=PPOPolicyLoss(), gbs=4, mbs=2)
    assert results[0]["global_loss"] == results[1]["global_loss"]
    saved = str(tmp_path / "w.nemo")
    ray.get(group.run_all_workers_single_data("save_checkpoint", weights_path=saved))
    assert (tmp_path / "w.nemo").exists()
    assert group.shutdown(cleanup_method="shutdown")
