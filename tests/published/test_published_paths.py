"""Import paths of the reference documents and of earlier versions have the library's own names."""

import importlib
import inspect
import re

import pytest
from documented import ROOT

from aligner.compat import paths

# Modules below ``aligner``, and names in them.
PATHS = """\
algorithms.interfaces: LossFunction
algorithms.logits_sampling_utils: TrainingSamplingParams
algorithms.loss.interfaces: LossFunction LossInputType
algorithms.loss.loss_functions: MseValueLossFn
distributed.batched_data_dict: BatchedDataDict SlicedDataDict
distributed.batched_data_dict: DynamicBatchingArgs SequencePackingArgs
distributed.model_utils: DistributedLogprob
distributed.named_sharding: NamedSharding
distributed.virtual_cluster: RayVirtualCluster
distributed.worker_groups: LocalCluster MultiWorkerFuture RayWorkerBuilder RayWorkerGroup
models.automodel.setup:
models.generation.interfaces: GenerationDatumSpec GenerationInterface GenerationOutputSpec
models.nlp.gpt.megatron_gpt_rs_actor: MegatronGPTRSModel
models.policy: PolicyConfig
models.policy.dtensor_policy_worker: DTensorPolicyWorker
models.policy.interfaces: ColocatablePolicyInterface LogprobOutputSpec ReferenceLogprobOutputSpec
models.policy.lm_policy: Policy
models.policy.megatron_policy_worker: MegatronPolicyWorker
models.policy.workers.base_policy_worker: AbstractPolicyWorker
models.policy.workers.dtensor_policy_worker_v2: DTensorPolicyWorkerV2
models.value.config: ValueConfig
models.value.interfaces: ValueOutputSpec
models.value.lm_value: Value
models.value.workers.dtensor_value_worker_v2: DTensorValueWorkerV2
models.value.workers.megatron_value_worker: MegatronValueWorker
utils.utils: load_from_nemo
data.packing: PackingAlgorithm SequencePacker get_packer
batches.batched_data_dict: BatchedDataDict
batches.sharding: DynamicBatchingArgs SequencePackingArgs
cluster.named_sharding: NamedSharding
cluster.ray.worker_group: RayWorkerGroup
config.elsewhere.nemo_rl: PolicyConfig ValueConfig
compat.nemo_rl: PolicyConfig ValueConfig
logprobs.published.logits_logprob: DistributedLogprob
cluster.ray.session: ray_session
cluster.ray.virtual_cluster: RayVirtualCluster
cluster.worker_groups: LocalCluster RayWorkerGroup
config.elsewhere.translate: translate
compat.translate: translate
data.labelled: LabelledDataset
data.ratings: RatedDataset
distributed.accelerator: device
distributed.parallel: initialize_parallel
algorithms.losses.interfaces: LossFunction
algorithms.losses.policy: PPOPolicyLoss
algorithms.losses.value: MseValueLossFn
models.policy.workers.dtensor_policy_worker: DTensorPolicyWorker
models.policy.workers.megatron_policy_worker: MegatronPolicyWorker
models.value: ValueConfig
"""


@pytest.mark.parametrize("line", PATHS.splitlines())
def test_a_published_path_has_the_librarys_own_names(line):
    path, _, names = line.partition(":")
    module = importlib.import_module(f"aligner.{path}")
    for name in names.split():
        published = getattr(module, name)
        if inspect.isclass(published) or inspect.isfunction(published):
            home = vars(importlib.import_module(published.__module__))
            assert home[published.__name__] is published
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


def test_every_name_of_the_page_is_in_the_file_that_lists_it():
    entry = re.compile(r"^- `(aligner/[\w/]+\.py)`: (.+?)(?=\n- |\n\n)", re.MULTILINE | re.DOTALL)
    listed = [
        (file, re.search(r"\w+", span)[0])
        for file, names in entry.findall((ROOT / "docs" / "published.md").read_text())
        for span in re.findall(r"`([^`]+)`", names)
    ]
    assert len(listed) > 120
    texts = {file: (ROOT / file).read_text() for file, _ in listed}
    assert [
        f"{file}: {name}" for file, name in listed if not re.search(rf"\b{name}\b", texts[file])
    ] == []
