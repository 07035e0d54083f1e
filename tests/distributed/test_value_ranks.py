"""A critic on two data-parallel workers: when weights are gathered, where they are, what is saved.

Forward pre-hooks, host memory and a checkpoint's round trip change no bit of the training, whose
optimizer is shared out over the workers; on another layout rounding differs.
"""

import pytest
import torch
from layout_worker import OPTIM, ROWS, fill_head, make_batch, model_config, weights_of
from ranks import on_ranks

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import CriticConfig
from aligner.device import accelerator
from aligner.distributed.workers import LocalCluster
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.value.lm_value import Value
from aligner.parallel.collectives import gather_objects
from aligner.parallel.groups import initialize_parallel

DATA, TENSOR = "1,1,1,0,padded", "2,1,1,1,padded"


def start(model, layout, *, offload=False, **paths):
    """A critic in one layout; bf16, so that the optimizer updates float32 copies."""
    config = model_config(model, layout)
    section = CriticConfig(
        micro_batch_size=2, global_batch_size=ROWS, optim=OPTIM, offload_weights=offload
    )
    cluster = LocalCluster(initialize_parallel(config.parallel))
    run = RunSettings(precision="bf16", gradient_clip_val=0.0)
    with open_nemo(model) as checkpoint:
        return Value(cluster, section, checkpoint.tokenizer, model=config, run=run, **paths)


def train(value, times):
    """The losses of so many passes."""
    batch = make_batch("")
    value.prepare_for_training()
    return [value.train(batch, PPOValueLoss(value_clip=None))["loss"] for _ in range(times)]


def ended(value):
    """Values and weights after training."""
    value.prepare_for_inference()
    values = value.get_values(make_batch(""))["values"]
    return {"values": values, "weights": weights_of(value)}


def hooked(model, head):
    """Three updates of which each leaves the weights to the next forward pass."""
    value = start(model, DATA, weights_path=head)
    worker = value.worker_group.worker
    worker.enable_forward_pre_hook()
    losses = train(value, 3)
    # Each rank has its own share of the last update, and no more of it.
    mine = torch.cat([p.detach().flatten().float() for p in worker.model.gpt.parameters()])
    ranks = gather_objects(mine)
    return {"losses": losses, "apart": (ranks[0] - ranks[1]).abs().max().item(), **ended(value)}


def offloaded(model, head):
    """Three updates, parked in host memory after each phase."""
    value = start(model, DATA, weights_path=head, offload=True)
    is_apart, accelerator.is_apart = accelerator.is_apart, lambda tensor: True
    losses = []
    for _ in range(3):
        losses += train(value, 1)
        value.finish_training()
        storages = [p.untyped_storage() for p in value.worker_group.worker.model.gpt.parameters()]
        assert not any(storage.nbytes() for storage in storages)
    seen = ended(value)
    accelerator.is_apart = is_apart
    return {"losses": losses, **seen}


def every_way(model, folder):
    """What each way of training ends with."""
    head, saved = str(folder / "head.nemo"), str(folder / "saved.nemo")
    first = start(model, DATA)
    fill_head(first)
    first.save_checkpoint(head)
    plain = start(model, DATA, weights_path=head)
    seen = {"plain": {"losses": train(plain, 3), **ended(plain)}}
    plain.save_checkpoint(saved, str(folder / "optimizer"), str(folder / "tokenizer"))
    seen["hooked"] = hooked(model, head)
    seen["offloaded"] = offloaded(model, head)
    for name, layout in (("continued", DATA), ("continued elsewhere", TENSOR)):
        value = start(model, layout, weights_path=saved, optimizer_path=str(folder / "optimizer"))
        seen[name] = {"losses": train(value, 2)}
    plain = start(model, DATA, weights_path=head)
    seen["plain"]["all losses"] = train(plain, 5)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("value")


@pytest.fixture(scope="module")
def seen(tiny_nemo, folder):
    return on_ranks(2, every_way, str(tiny_nemo), folder, timeout_s=200)


@pytest.mark.parametrize("way", ["hooked", "offloaded"])
def test_the_way_changes_nothing(way, seen):
    plain, other = seen["plain"], seen[way]
    assert other.get("apart", 1) > 0  # the gather was left to the next forward pass
    assert plain["losses"][0] > plain["losses"][2]  # something was learnt
    assert other["losses"] == plain["losses"]
    assert torch.equal(other["values"], plain["values"])
    assert plain["weights"].keys() == other["weights"].keys()
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


def test_a_checkpoint_continues(seen, folder):
    expected = seen["plain"]["all losses"]
    assert expected[:3] == seen["plain"]["losses"]
    assert seen["continued"]["losses"] == expected[3:]
    assert seen["continued elsewhere"]["losses"] == pytest.approx(expected[3:], rel=1e-2)
    files = sorted(path.name for path in (folder / "optimizer").iterdir())
    assert files == ["checksums.json", "rank_00000.pt", "rank_00001.pt"]
    assert (folder / "tokenizer" / "tokenizer.json").exists()
