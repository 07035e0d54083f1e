"""Import paths of the reference documents: the names are there, and are the library's own."""

import importlib

import pytest

from aligner.compat import paths

# Module, name there: home of the name, and its name there where that is another.
PATHS = {
    "aligner.algorithms.interfaces": {"LossFunction": "aligner.losses.interfaces"},
    "aligner.algorithms.logits_sampling_utils": {
        "TrainingSamplingParams": "aligner.logprobs.top_k_top_p"
    },
    "aligner.algorithms.loss.interfaces": {
        "LossFunction": "aligner.losses.interfaces",
        "LossInputType": "aligner.losses.interfaces",
    },
    "aligner.algorithms.loss.loss_functions": {"MseValueLossFn": "aligner.losses.value"},
    "aligner.distributed.batched_data_dict": {
        "BatchedDataDict": "aligner.distributed.batched_data_dict",
        "SlicedDataDict": "aligner.distributed.batched_data_dict",
        "DynamicBatchingArgs": "aligner.distributed.sharding",
        "SequencePackingArgs": "aligner.distributed.sharding",
    },
    "aligner.distributed.model_utils": {
        "DistributedLogprob": "aligner.distributed.model_utils.logits_logprob"
    },
    "aligner.distributed.named_sharding": {"NamedSharding": "aligner.distributed.named_sharding"},
    "aligner.distributed.virtual_cluster": {
        "RayVirtualCluster": "aligner.distributed.virtual_cluster"
    },
    "aligner.distributed.worker_groups": {
        "LocalCluster": "aligner.distributed.workers",
        "MultiWorkerFuture": "aligner.distributed.worker_groups",
        "RayWorkerBuilder": "aligner.distributed.worker_groups",
        "RayWorkerGroup": "aligner.distributed.worker_groups",
    },
    "aligner.models.automodel.setup": {},
    "aligner.models.generation.interfaces": {
        "GenerationDatumSpec": "aligner.models.interfaces",
        "GenerationInterface": "aligner.models.interfaces",
        "GenerationOutputSpec": "aligner.models.interfaces",
    },
    "aligner.models.nlp.gpt.megatron_gpt_rs_actor": {
        "MegatronGPTRSModel": "aligner.models.gpt.megatron.actor"
    },
    "aligner.models.policy": {"PolicyConfig": "aligner.compat.nemo_rl"},
    "aligner.models.policy.dtensor_policy_worker": {
        "DTensorPolicyWorker": ("aligner.models.policy.workers.policy_worker:DTensorPolicyWorkerV2")
    },
    "aligner.models.policy.interfaces": {
        "ColocatablePolicyInterface": "aligner.models.interfaces",
        "LogprobOutputSpec": "aligner.models.interfaces",
        "ReferenceLogprobOutputSpec": "aligner.models.interfaces",
    },
    "aligner.models.policy.lm_policy": {"Policy": "aligner.models.policy.lm_policy"},
    "aligner.models.policy.megatron_policy_worker": {
        "MegatronPolicyWorker": "aligner.models.policy.workers.policy_worker"
    },
    "aligner.models.policy.workers.base_policy_worker": {
        "AbstractPolicyWorker": "aligner.models.worker:RoleWorker"
    },
    "aligner.models.policy.workers.dtensor_policy_worker_v2": {
        "DTensorPolicyWorkerV2": "aligner.models.policy.workers.policy_worker"
    },
    "aligner.models.value.config": {"ValueConfig": "aligner.compat.nemo_rl"},
    "aligner.models.value.interfaces": {"ValueOutputSpec": "aligner.models.interfaces"},
    "aligner.models.value.lm_value": {"Value": "aligner.models.value.lm_value"},
    "aligner.models.value.workers.dtensor_value_worker_v2": {
        "DTensorValueWorkerV2": "aligner.models.value.workers.value_worker"
    },
    "aligner.models.value.workers.megatron_value_worker": {
        "MegatronValueWorker": "aligner.models.value.workers.value_worker"
    },
    "aligner.utils.utils": {"load_from_nemo": "aligner.models.gpt.megatron.model"},
    "aligner.data.packing": {
        "PackingAlgorithm": "aligner.distributed.packing",
        "SequencePacker": "aligner.distributed.packing",
        "get_packer": "aligner.distributed.packing",
    },
    # Of earlier versions of this library, and the worker's names without a version.
    "aligner.batches.batched_data_dict": {
        "BatchedDataDict": "aligner.distributed.batched_data_dict"
    },
    "aligner.cluster.ray.session": {"ray_session": "aligner.distributed.ray.session"},
    "aligner.cluster.ray.virtual_cluster": {
        "RayVirtualCluster": "aligner.distributed.virtual_cluster"
    },
    "aligner.cluster.worker_groups": {
        "LocalCluster": "aligner.distributed.workers",
        "RayWorkerGroup": "aligner.distributed.worker_groups",
    },
    "aligner.config.elsewhere.translate": {"translate": "aligner.compat.translate"},
    "aligner.data.labelled": {"LabelledDataset": "aligner.data.preferences"},
    "aligner.data.ratings": {"RatedDataset": "aligner.data.preferences"},
    "aligner.distributed.accelerator": {"device": "aligner.device.accelerator"},
    "aligner.distributed.parallel": {"initialize_parallel": "aligner.parallel.groups"},
    "aligner.algorithms.losses.interfaces": {"LossFunction": "aligner.losses.interfaces"},
    "aligner.algorithms.losses.policy": {"PPOPolicyLoss": "aligner.losses.policy"},
    "aligner.algorithms.losses.value": {"MseValueLossFn": "aligner.losses.value"},
    "aligner.models.policy.workers.dtensor_policy_worker": {
        "DTensorPolicyWorker": ("aligner.models.policy.workers.policy_worker:DTensorPolicyWorkerV2")
    },
    "aligner.models.policy.workers.megatron_policy_worker": {
        "MegatronPolicyWorker": "aligner.models.policy.workers.policy_worker"
    },
    "aligner.models.value": {"ValueConfig": "aligner.compat.nemo_rl"},
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


def test_every_path_of_the_table_has_homes_that_are_there():
    for path in paths.PATHS:
        for home in paths._targets(f"aligner.{path}"):
            importlib.import_module(home)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("aligner.models.generation.nowhere")


def test_an_unknown_name_is_refused_as_everywhere():
    module = importlib.import_module("aligner.distributed.worker_groups")
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchGroup'"):
        module.NoSuchGroup  # noqa: B018
