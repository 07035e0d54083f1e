"""One rank of `test_value_ranks`: critics of two data-parallel workers, trained in several ways.

    MODEL FOLDER

Rank 0 writes what it saw to FOLDER/seen.pt.
"""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from layout_worker import OPTIM, ROWS, fill_head, make_batch, model_config, weights_of

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import CriticConfig
from aligner.device import accelerator
from aligner.distributed.workers import LocalCluster
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.value.lm_value import Value
from aligner.parallel.collectives import gather_objects
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

DATA, TENSOR = "1,1,1,0,padded", "2,1,1,1,padded"


def start(model: str, layout: str, **kwargs: object) -> Value:
    """A critic in one layout; bf16, so that the optimizer updates float32 copies."""
    config = model_config(model, layout)
    section = CriticConfig(
        micro_batch_size=2,
        global_batch_size=ROWS,
        optim=OPTIM,
        offload_weights=bool(kwargs.pop("offload", False)),
    )
    cluster = LocalCluster(initialize_parallel(config.parallel))
    run = RunSettings(precision="bf16", gradient_clip_val=0.0)
    with open_nemo(model) as checkpoint:
        return Value(cluster, section, checkpoint.tokenizer, model=config, run=run, **kwargs)


def train(value: Value, times: int) -> list[float]:
    """The losses of so many passes."""
    batch = make_batch("")
    value.prepare_for_training()
    return [value.train(batch, PPOValueLoss(value_clip=None))["loss"] for _ in range(times)]


def hooked(model: str, head: str) -> dict[str, object]:
    """Three updates of which each leaves the weights to the next forward pass."""
    value = start(model, DATA, weights_path=head)
    worker = value.worker_group.worker
    worker.enable_forward_pre_hook()
    losses = train(value, 3)
    # Each rank has its own share of the last update, and no more of it.
    mine = torch.cat([p.detach().flatten().float() for p in worker.model.gpt.parameters()])
    ranks = gather_objects(mine)
    value.prepare_for_inference()
    seen = value.get_values(make_batch(""))["values"]
    return {
        "losses": losses,
        "apart": (ranks[0] - ranks[1]).abs().max().item(),
        "values": seen,
        "weights": weights_of(value),
    }


def offloaded(model: str, head: str) -> dict[str, object]:
    """Three updates, parked in host memory after each phase."""
    value = start(model, DATA, weights_path=head, offload=True)
    is_apart, accelerator.is_apart = accelerator.is_apart, lambda tensor: True
    losses = []
    for _ in range(3):
        losses += train(value, 1)
        value.finish_training()
        storages = [p.untyped_storage() for p in value.worker_group.worker.model.gpt.parameters()]
        assert not any(storage.nbytes() for storage in storages)
    value.prepare_for_inference()
    seen = value.get_values(make_batch(""))["values"]
    accelerator.is_apart = is_apart
    return {"losses": losses, "values": seen, "weights": weights_of(value)}


def main() -> None:
    """Every way, then the file."""
    model, folder = sys.argv[1], Path(sys.argv[2])
    head, saved = str(folder / "head.nemo"), str(folder / "saved.nemo")
    first = start(model, DATA)
    fill_head(first)
    first.save_checkpoint(head)
    plain = start(model, DATA, weights_path=head)
    seen: dict[str, dict[str, object]] = {"plain": {"losses": train(plain, 3)}}
    plain.prepare_for_inference()
    seen["plain"] |= {
        "values": plain.get_values(make_batch(""))["values"],
        "weights": weights_of(plain),
    }
    plain.save_checkpoint(saved, str(folder / "optimizer"), str(folder / "tokenizer"))
    seen["hooked"] = hooked(model, head)
    seen["offloaded"] = offloaded(model, head)
    for name, layout in (("continued", DATA), ("continued elsewhere", TENSOR)):
        value = start(model, layout, weights_path=saved, optimizer_path=str(folder / "optimizer"))
        seen[name] = {"losses": train(value, 2)}
    plain = start(model, DATA, weights_path=head)
    seen["plain"]["all losses"] = train(plain, 5)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, folder / "seen.pt")
    shutdown_parallel()


if __name__ == "__main__":
    main()
