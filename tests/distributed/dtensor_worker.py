"""One rank of `test_dtensor_layouts`: actor and critic of either backend in each layout.

    torchrun --nproc-per-node N dtensor_worker.py FOLDER SPEC [SPEC ...]

A spec is ``family,backend,tensor,mode[,state]``. The models are FAMILY.nemo and FAMILY_critic.nemo
in FOLDER, or the directory FAMILY for both. The processes that tensor parallelism leaves are data
parallel. The mode says how micro-batches are formed. With ``state`` the roles resume from the run
state of that name. Rank 0 writes what it saw to FOLDER/N.pt, and run states to a folder ``N,spec``
each.
"""

import dataclasses
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from layout_worker import (
    OPTIM,
    ROWS,
    RUN,
    loss_of,
    make_batch,
    model_config,
    reference,
    reported,
    scores,
    weights_of,
)

from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.run_state.worker_state import save_worker_state
from aligner.config import CriticConfig, LengthParams, ModelConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

Seen = dict[str, object]


def start(folder: Path, spec: str) -> tuple[Policy, Value]:
    family, backend, tensor, mode = spec.split(",")[:4]
    model, critic = str(folder / f"{family}.nemo"), str(folder / f"{family}_critic.nemo")
    if (folder / family).is_dir():
        model = critic = str(folder / family)
    config: ModelConfig = model_config(model, f"{tensor},1,1,0,{mode}")
    short = dataclasses.replace(config.ppo, length_params=LengthParams(max_length=12))
    config = dataclasses.replace(config, ppo=short)
    cluster = LocalCluster(initialize_parallel(config.parallel))
    section = CriticConfig(
        restore_from_path=critic,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=ROWS,
        optim=OPTIM,
    )
    with open_model(model) as source:
        tokenizer = source.tokenizer
    return (
        Policy(cluster, config, tokenizer, run=RUN, backend=backend),
        Value(cluster, section, tokenizer, model=config, run=RUN, backend=backend),
    )


def generated(policy: Policy, batch: BatchedDataDict) -> list[torch.Tensor]:
    """Responses to the first tokens of every row, and what a filter kept where it is recorded."""
    prompts = BatchedDataDict(
        {
            "input_ids": batch["input_ids"][:, :5],
            "input_lengths": torch.full((ROWS,), 5),
            "sample_ids": torch.arange(ROWS),
        }
    )
    policy.prepare_for_generation()
    output = policy.generate(prompts, seed=5)
    policy.finish_generation()
    rows = zip(output["output_ids"], output["unpadded_sequence_lengths"], strict=True)
    kept = [output["kept_ids"].sort().values] if "kept_ids" in output else []
    return [tokens[:length] for tokens, length in rows] + kept


def learn(handle: Policy | Value, batch: BatchedDataDict, state: Path, resumed: bool) -> Seen:
    loss, seen = loss_of(handle), {"before": scores(handle, batch)}
    if isinstance(handle, Policy):
        seen["one row"] = scores(handle, batch.slice(0, 1))  # fewer than ranks
    handle.prepare_for_training()
    if not resumed:
        seen["first"] = reported(handle.train(batch, loss))
        save_worker_state(handle.worker_group.worker, str(state))
    else:
        handle.load_state(state)
    seen["second"] = reported(handle.train(batch, loss))
    seen["weights"] = weights_of(handle)
    seen |= {"after": scores(handle, batch), **reference(handle, batch)}
    if isinstance(handle, Policy):
        seen["generated"] = generated(handle, batch)
    if not resumed:
        handle.load_state(state)
        handle.train(batch, loss)
        seen["again"] = weights_of(handle)
    return seen


def main() -> None:
    """Every spec, then the file."""
    folder, *specs = sys.argv[1:]
    ranks = os.environ["WORLD_SIZE"]
    seen = {}
    for spec in specs:
        _, _, _, _, *resumed = spec.split(",", 4)
        states = Path(folder) / (resumed[0] if resumed else f"{ranks},{spec}")
        states.mkdir(exist_ok=True)
        batch = make_batch(spec)
        policy, value = start(Path(folder), spec)
        seen[spec] = {
            "actor": learn(policy, batch, states / "actor", bool(resumed)),
            "critic": learn(value, batch, states / "critic", bool(resumed)),
        }
    if torch.distributed.get_rank() == 0:
        torch.save(seen, Path(folder) / f"{ranks}.pt")
    shutdown_parallel()


if __name__ == "__main__":
    main()
