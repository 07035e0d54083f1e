"""`trainer.deterministic`, tensor parallelism, dropout: a resumed run is the same to the bit.

Dropout of what every tensor-parallel rank has is drawn from torch's generator, that of what each
has a part of from megatron-core's; both go on where they were.
"""

import copy

import pytest
import torch
from ranks import on_ranks
from test_run_state_layouts import make_batch, worker_of, write_models

from aligner.checkpoint.run_state.tree import capture_rng, restore_rng
from aligner.checkpoint.run_state.worker_state import load_worker_state, save_worker_state
from aligner.config import OptimConfig, ParallelConfig
from aligner.device import accelerator
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings


def built(folder, sequence_parallel, dropout):
    settings = RoleSettings(
        parallel=ParallelConfig(tensor=2, sequence_parallel=sequence_parallel),
        optim=OptimConfig(lr=1e-3),
        micro_batch_size=2,
        dropout=dropout,
    )
    role = load_from_nemo(MegatronGPTActorModel, settings, restore_path=folder / "llama.nemo")
    role.setup_training()
    role.loss_fn = PPOPolicyLoss()
    return role


def trained(role):
    """Metrics of two updates, and the weights after them."""
    role.prepare_for_training()
    seen = [role.training_update(make_batch()) for _ in range(2)]
    return seen, {name: value.detach().clone() for name, value in role.gpt.named_parameters()}


def check(folder, sequence_parallel):
    role = built(folder, sequence_parallel, 0.2)
    before = copy.deepcopy(capture_rng(accelerator.rng_state))
    trained(role)
    state = folder / f"state_{sequence_parallel}"
    if role.parallel.rank == 0:
        state.mkdir()
    torch.distributed.barrier()
    save_worker_state(worker_of(role), str(state))
    metrics, weights = copy.deepcopy(trained(role))

    again = built(folder, sequence_parallel, 0.2)
    load_worker_state(worker_of(again), str(state))
    same_metrics, same = trained(again)
    assert metrics == same_metrics
    assert [name for name in weights if not torch.equal(weights[name], same[name])] == []

    # With the random states of another time, and without dropout, it is not the same.
    for dropout in (0.2, 0.0):
        other = built(folder, sequence_parallel, dropout)
        load_worker_state(worker_of(other), str(state))
        restore_rng(before, accelerator.set_rng_state)
        assert trained(other)[0] != metrics


def resume_exactly(folder):
    accelerator.make_deterministic()
    for sequence_parallel in (False, True):
        check(folder, sequence_parallel)


@pytest.mark.timeout(300)
def test_two_tensor_ranks_go_on_where_they_were(tmp_path):
    write_models(tmp_path)
    on_ranks(2, resume_exactly, tmp_path)
