"""A critic on two data-parallel workers whose weights are gathered by the next forward pass.

Forward pre-hooks change no bit of the training, whose optimizer is shared out over the workers.
"""

import torch
from layout_worker import OPTIM, ROWS, fill_head, make_batch, model_config, weights_of
from ranks import on_ranks

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import CriticConfig
from aligner.distributed.workers import LocalCluster
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.value.lm_value import Value
from aligner.parallel.collectives import gather_objects
from aligner.parallel.groups import initialize_parallel


def start(model, **paths):
    """A critic; bf16, so that the optimizer updates float32 copies."""
    config = model_config(model, "1,1,1,0,padded")
    section = CriticConfig(micro_batch_size=2, global_batch_size=ROWS, optim=OPTIM)
    cluster = LocalCluster(initialize_parallel(config.parallel))
    run = RunSettings(precision="bf16", gradient_clip_val=0.0)
    with open_nemo(model) as checkpoint:
        return Value(cluster, section, checkpoint.tokenizer, model=config, run=run, **paths)


def learned(value):
    """Losses of three updates; the gap between ranks, values and weights after the last update."""
    batch = make_batch("")
    value.prepare_for_training()
    losses = [value.train(batch, PPOValueLoss(value_clip=None))["loss"] for _ in range(3)]
    # With hooks each rank has its own share of the last update, and no more of it.
    gpt = value.worker_group.worker.model.gpt
    ranks = gather_objects(torch.cat([p.detach().flatten().float() for p in gpt.parameters()]))
    value.prepare_for_inference()
    values = value.get_values(batch)["values"]
    apart = (ranks[0] - ranks[1]).abs().max().item()
    return {"losses": losses, "apart": apart, "values": values, "weights": weights_of(value)}


def both_ways(model, folder):
    head = str(folder / "head.nemo")
    first = start(model)
    fill_head(first)
    first.save_checkpoint(head)
    plain, hooked = (start(model, weights_path=head) for _ in range(2))
    hooked.worker_group.worker.enable_forward_pre_hook()
    return learned(plain), learned(hooked)


def test_a_gather_before_the_next_pass_changes_nothing(tiny_nemo, tmp_path):
    plain, hooked = on_ranks(2, both_ways, str(tiny_nemo), tmp_path, timeout_s=200)
    assert plain["apart"] == 0
    assert hooked["apart"] > 0  # the gather was left to the next forward pass
    assert plain["losses"][0] > plain["losses"][2]  # something was learnt
    assert hooked["losses"] == plain["losses"]
    assert torch.equal(hooked["values"], plain["values"])
    assert plain["weights"].keys() == hooked["weights"].keys()
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, hooked["weights"][name]), name
