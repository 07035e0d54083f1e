"""In every layout a policy hands over exactly the weights of its file, by Hugging Face's names."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.tensors import HuggingFaceView
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import ModelConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.models.policy.workers.megatron_policy_worker import MegatronPolicyWorker
from aligner.parallel.groups import initialize_parallel
from aligner.refit.controller import group_by_bytes
from aligner.refit.segments import accept

DENSE = dataclasses.replace(
    TINY_ARCHITECTURE, num_layers=2, vocab_size=260, bias_qkv=True, family="qwen2"
)
TIED = dataclasses.replace(TINY_ARCHITECTURE, num_layers=2, tie_embeddings=True)
EXPERTS = dataclasses.replace(TINY_ARCHITECTURE, num_layers=2, num_moe_experts=4, family="mixtral")
MODELS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS}
# Processes: name of the model; tensor, pipeline and expert parallel sizes.
CASES = {
    2: [("dense", 2, 1, 1), ("dense", 1, 2, 1), ("tied", 1, 2, 1), ("experts", 1, 1, 2)],
    4: [("dense", 2, 2, 1), ("experts", 2, 1, 4)],
}
BUDGET = 20_000  # bytes; less than the largest tensor


def pushed(model, tensor, pipeline, expert):
    """All weights through shared memory, group by group, as the other side would map them."""
    config = ModelConfig(
        restore_from_path=model,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        sequence_parallel=tensor > 1,
    )
    with open_nemo(model) as checkpoint:
        tokenizer = checkpoint.tokenizer
    worker = MegatronPolicyWorker(
        config,
        tokenizer,
        parallel=initialize_parallel(config.parallel),
        init_optimizer=False,
        init_reference_model=False,
    )
    worker.offload_before_refit()
    info = worker.prepare_refit_info()
    names_and_bytes, _ = worker.prepare_weights_for_ipc()
    groups = group_by_bytes(names_and_bytes, BUDGET)
    assert len(groups) > 3
    assert worker.get_weights_ipc_handles(groups[0], ["another machine"]) == {}
    received = {}
    for keys in groups:
        handles = worker.get_weights_ipc_handles(keys, [accelerator.sharing_key()])
        if dist.get_rank() == 0:
            received |= {name: tensor.clone() for name, tensor in accept(handles)}
        else:
            assert handles == {}  # one worker of a machine offers
    worker.offload_after_refit()
    if dist.get_rank() == 0:
        seen = {name: (tuple(t.shape), t.dtype) for name, t in received.items()}
        assert list(seen.items()) == list(info.items())
    return received


def push_all(folder, cases):
    return [pushed(str(folder / name), *sizes) for name, *sizes in cases]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", CASES)
def test_weights_leave_as_they_are_in_the_file(ranks, tmp_path):
    weights = {}
    for name, architecture in MODELS.items():
        weights[name] = random_weights(architecture, seed=3)
        files = byte_level_tokenizer().files()
        save_nemo(tmp_path / name, weights[name], architecture, files)
    received = on_ranks(ranks, push_all, tmp_path, CASES[ranks], timeout_s=380)
    for case, seen in zip(CASES[ranks], received, strict=True):
        architecture = MODELS[case[0]]
        family, _ = config_to_hf(architecture)
        expected = HuggingFaceView(weights[case[0]], family.table, architecture)
        assert list(seen) == list(expected)
        for key, tensor in expected.items():
            assert torch.equal(seen[key], tensor), (case, key)
