"""Import paths of the reference documents: the names are there, and are the library's own."""

import importlib

import pytest

PATHS = {
    "aligner.algorithms.logits_sampling_utils": {
        "TrainingSamplingParams": "aligner.logprobs.top_k_top_p",
    },
    "aligner.algorithms.losses.interfaces": {"LossFunction": "aligner.losses.interfaces"},
    "aligner.algorithms.losses.policy": {"PPOPolicyLoss": "aligner.losses.policy"},
    "aligner.algorithms.losses.value": {"MseValueLossFn": "aligner.losses.value"},
    "aligner.distributed.batched_data_dict": {
        "BatchedDataDict": "aligner.batches.batched_data_dict",
        "SlicedDataDict": "aligner.batches.batched_data_dict",
        "DynamicBatchingArgs": "aligner.batches.sharding",
        "SequencePackingArgs": "aligner.batches.sharding",
    },
    "aligner.distributed.model_utils": {
        "DistributedLogprob": "aligner.logprobs.published.logits_logprob",
    },
    "aligner.distributed.named_sharding": {"NamedSharding": "aligner.cluster.named_sharding"},
    "aligner.distributed.virtual_cluster": {
        "RayVirtualCluster": "aligner.cluster.ray.virtual_cluster",
    },
    "aligner.distributed.worker_groups": {
        "LocalCluster": "aligner.cluster.worker_groups",
        "MultiWorkerFuture": "aligner.cluster.ray.calls",
        "RayWorkerBuilder": "aligner.cluster.ray.worker_group",
        "RayWorkerGroup": "aligner.cluster.ray.worker_group",
    },
    "aligner.models.policy": {"PolicyConfig": "aligner.config.elsewhere.nemo_rl"},
    "aligner.models.policy.lm_policy": {"Policy": "aligner.models.policy.lm_policy"},
    "aligner.models.policy.workers.dtensor_policy_worker": {
        "DTensorPolicyWorker": (
            "aligner.models.policy.workers.dtensor_policy_worker_v2:DTensorPolicyWorkerV2"
        ),
    },
    "aligner.models.policy.workers.megatron_policy_worker": {
        "MegatronPolicyWorker": "aligner.models.policy.workers.megatron_policy_worker",
    },
    "aligner.models.value": {"ValueConfig": "aligner.config.elsewhere.nemo_rl"},
    "aligner.models.value.workers.megatron_value_worker": {
        "MegatronValueWorker": "aligner.models.value.workers.megatron_value_worker",
    },
}


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in PATHS.items() for name in names]
)
def test_a_published_path_has_the_librarys_own(path, name):
    published = getattr(importlib.import_module(path), name)
    home, _, own = PATHS[path][name].partition(":")
    assert published is vars(importlib.import_module(home))[own or name]


@pytest.mark.parametrize("path", PATHS)
def test_what_a_published_path_lists_is_there(path):
    module = importlib.import_module(path)
    assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []


def test_an_unknown_name_is_refused_as_everywhere():
    module = importlib.import_module("aligner.distributed.worker_groups")
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchGroup'"):
        module.NoSuchGroup  # noqa: B018
