"""One rank of `test_refit_layouts`: a policy worker's weights on their way out.

    torchrun --nproc-per-node N refit_rank.py OUTPUT MODEL:TENSOR,PIPELINE,EXPERT ...

Rank 0 writes, for every case, what the other side of a colocated refit would have mapped.
"""

import sys

import torch

torch.set_num_threads(1)

import torch.distributed as dist

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import ModelConfig
from aligner.device import accelerator
from aligner.models.policy.workers.megatron_policy_worker import MegatronPolicyWorker
from aligner.parallel.groups import initialize_parallel, shutdown_parallel
from aligner.refit.controller import group_by_bytes
from aligner.refit.segments import accept

BUDGET = 20_000  # bytes; less than the largest tensor


def pushed(model: str, sizes: list[int]) -> dict[str, torch.Tensor]:
    """All weights through shared memory, group by group."""
    tensor, pipeline, expert = sizes
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
    received: dict[str, torch.Tensor] = {}
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


def main() -> None:
    """Every case, then the file."""
    output, *cases = sys.argv[1:]
    results = {}
    for case in cases:
        model, sizes = case.rsplit(":", 1)
        results[case] = pushed(model, [int(size) for size in sizes.split(",")])
    if dist.get_rank() == 0:
        torch.save(results, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
