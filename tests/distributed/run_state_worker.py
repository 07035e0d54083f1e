"""Roles that train, save and restore; one rank of `test_run_state_layouts` when it is run.

    torchrun --nproc-per-node 2 run_state_worker.py FOLDER

``FOLDER`` holds the models and, for each case, the run state of one process after two updates.
Here two processes restore it in each of their layouts, train on their own, and hand over to one
another; what each hand-over ends with is saved for the test to look at.
"""

import dataclasses
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import ppo_batch
from newest_state import newest
from rich.console import Console

torch.set_num_threads(1)

from aligner.algorithms.run.loop import RunLoop, Schedule, StepResult
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.worker_state import (
    SavedShares,
    ShareWriter,
    StatefulWorker,
    load_worker_state,
)
from aligner.config import OptimConfig, ParallelConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import DamagedStateError, StorageError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, load_from_nemo
from aligner.models.gpt.megatron import state as sharded_state
from aligner.models.gpt.megatron.model import MegatronGPTModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import gather_objects
from aligner.parallel.groups import shutdown_parallel

LLAMA = dataclasses.replace(TINY_ARCHITECTURE, num_layers=2)
GPT = dataclasses.replace(  # tied, with biases and learned positions
    LLAMA,
    activation="gelu",
    normalization="layernorm",
    position_embedding="learned_absolute",
    bias_linear=True,
    tie_embeddings=True,
)
MODELS = {"llama": LLAMA, "tied llama": dataclasses.replace(LLAMA, tie_embeddings=True), "gpt": GPT}
CASES = {  # role, model, precision
    "untied": (MegatronGPTActorModel, "llama", "32"),
    "tied": (MegatronGPTActorModel, "gpt", "32"),
    "critic": (MegatronGPTCriticModel, "tied llama", "bf16"),  # its head stays float32
}
ONE = ParallelConfig()
PAIRS = {
    "data": ParallelConfig(),
    "tensor": ParallelConfig(tensor=2),
    "pipe": ParallelConfig(pipeline=2),
}
HANDOVERS = [
    *[("one", layout) for layout in PAIRS],
    *[("tensor", "pipe"), ("pipe", "data"), ("data", "tensor")],
]


def write_models(folder: Path) -> None:
    for name, architecture in MODELS.items():
        weights = random_weights(architecture, scale=0.1)
        save_nemo(folder / f"{name}.nemo", weights, architecture, byte_level_tokenizer().files())


def make_batch() -> dict[str, torch.Tensor]:
    return ppo_batch([12, 7, 10, 12], [3] * 4)


def build(folder: Path, case: str, parallel: ParallelConfig) -> MegatronGPTModel:
    cls, model, precision = CASES[case]
    settings = RoleSettings(
        parallel=parallel,
        precision=precision,
        optim=OptimConfig(lr=1e-3, eps=1e-3, weight_decay=0.1),
        micro_batch_size=2,
    )
    role = load_from_nemo(cls, settings, restore_path=folder / f"{model}.nemo")
    role.setup_training()
    is_critic = cls is MegatronGPTCriticModel
    role.loss_fn = PPOValueLoss(value_clip=None) if is_critic else PPOPolicyLoss()
    return role


def train(role: MegatronGPTModel, updates: int) -> None:
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    share = {key: value.chunk(ranks)[rank] for key, value in make_batch().items()}
    role.prepare_for_training()
    for _ in range(updates):
        role.training_update(share)


def store(folder: Path, role: MegatronGPTModel) -> RunStateStore:
    state = role.parallel
    return RunStateStore(folder, save_top_k=2, rank=state.rank, exchange=gather_objects)


def worker_of(role: MegatronGPTModel) -> StatefulWorker:
    return SimpleNamespace(
        parallel=role.parallel, state_dict=role.run_state, load_state_dict=role.load_run_state
    )


class Saved:
    """A role as the run loop saves it."""

    def __init__(self, role: MegatronGPTModel) -> None:
        self.num_shares = role.parallel.world_size
        self._writer = ShareWriter(worker_of(role))

    def begin_saving(self, folder: Path, in_background: bool) -> None:
        self._writer.begin(str(folder), in_background)

    def check_saving(self, wait: bool) -> None:
        if (failure := self._writer.failure(wait)) is not None:
            raise StorageError(failure)


def save(folder: Path, role: MegatronGPTModel, meanwhile: Callable[[], None] | None = None) -> None:
    """Save a state; what happens ``meanwhile`` is not in it."""
    states = store(folder, role)
    saved = {"role": Saved(role)}
    states.save(role.optimizer.steps, {}, roles=saved, in_background=meanwhile is not None)
    if meanwhile is not None:
        meanwhile()
        states.finish()


def restore(folder: Path, role: MegatronGPTModel) -> None:
    load_worker_state(worker_of(role), str(newest(store(folder, role)) / "role"))


def tensors(role: MegatronGPTModel) -> dict[str, torch.Tensor]:
    """Weights of this process, and what its optimizer keeps of them."""
    names = {parameter: name for name, parameter in role.gpt.named_parameters()}
    found = {name: parameter.detach().clone() for parameter, name in names.items()}
    for owned in role.optimizer.owned_slices():
        kept = {"main": owned.main.detach(), **owned.moments()}
        found |= {f"{names[owned.parameter]} {kind}": t.clone() for kind, t in kept.items()}
    return found


def check_equal(case: str, seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == wanted.keys(), case
    odd = [name for name, value in wanted.items() if not torch.equal(seen[name], value)]
    assert not odd, (case, odd)


def continues_to_the_bit(models: Path, folder: Path, case: str, parallel: ParallelConfig) -> None:
    """A role saved and restored on its own layout goes on as if nothing had happened."""
    role = build(models, case, parallel)
    save(folder / "untrained", role)
    train(role, 2)
    trained = tensors(role)
    save(folder, role, meanwhile=lambda: train(role, 1))

    again = build(models, case, parallel)
    restore(folder, again)
    check_equal(case, tensors(again), trained)
    train(again, 1)
    assert again.optimizer.steps == 3
    check_equal(case, tensors(again), tensors(role))

    restore(folder / "untrained", again)  # no moments yet: none are kept
    train(again, 2)
    check_equal(case, tensors(again), trained)


def mapped_bytes(folder: Path) -> dict[str, int]:
    """Bytes of files below ``folder`` that this process has in memory because it read them."""
    found: dict[str, int] = {}
    name = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            name = line.split()[-1]
        elif line.startswith("Rss:") and name is not None and name.startswith(str(folder)):
            found[Path(name).name] = found.get(Path(name).name, 0) + 1024 * int(line.split()[1])
    return found


def a_rank_reads_its_own(folder: Path, case: str, layout: str, before: str) -> None:
    """Restored on its layout a rank maps its own file alone; on another, it reads what it needs."""
    role = build(folder, case, PAIRS[layout])
    path = newest(store(folder / case / before, role)) / "role"
    rank, asked = role.parallel.rank, []
    real = sharded_state._SavedRole._saved

    def counting(saved, name: str, kind: str, index: int, place: range) -> torch.Tensor:
        asked.append((kind, len(place)))
        return real(saved, name, kind, index, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_state._SavedRole, "_saved", counting)
        gc.collect()  # earlier restores have mapped the same files
        shares = SavedShares(path, rank)
        role.load_run_state(shares)
    own = sum(owned.main.numel() for owned in role.optimizer.owned_slices())
    by_kind = {kind: sum(n for each, n in asked if each == kind) for kind, _ in asked}
    sizes = {file.name: file.stat().st_size for file in path.glob("*.pt")}
    mapped = mapped_bytes(path)
    if before == layout:
        assert by_kind == {"weight": own, "exp_avg": own, "exp_avg_sq": own}, (by_kind, own)
        assert mapped.keys() == {f"rank_{rank:05d}.pt"}, mapped
    else:  # rows of a weight that is split along its columns are read whole
        assert by_kind.keys() == {"weight", "exp_avg", "exp_avg_sq"}
        assert all(own <= count <= 1.6 * own for count in by_kind.values()), (by_kind, own)
    assert sum(mapped.values()) <= sum(sizes.values()) + 2**16 * len(sizes), (mapped, sizes)


def damage_of_one_share_is_known_to_every_rank(folder: Path, role: MegatronGPTModel) -> None:
    """Each rank reads its own file; none restores anything where one of them is not whole."""
    save(folder, role)
    path = newest(store(folder, role)) / "role"
    torch.distributed.barrier()  # until both have found it whole
    if torch.distributed.get_rank() == 1:
        share = path / "rank_00001.pt"
        content = bytearray(share.read_bytes())
        content[len(content) // 2] ^= 1
        share.write_bytes(bytes(content))
    before = tensors(role)
    with pytest.raises(DamagedStateError, match=r"rank_00001\.pt is damaged"):
        restore(folder, role)
    check_equal("damage", tensors(role), before)


class Idle:
    """A learner that does nothing."""

    is_out_of_data = False

    def step(self, step: int, timers: object) -> StepResult:
        return StepResult({})

    validate = step


class FullDisk:
    """Metrics and samples that only rank 0 writes, and cannot."""

    def write(self, *args: object) -> None:
        assert not torch.distributed.get_rank()
        raise StorageError("No space left on device")


def a_full_disk_stops_every_rank(folder: Path) -> None:
    """What rank 0 cannot write is known to its peer before it waits for anything else."""
    full = FullDisk()
    loop = RunLoop(
        Idle(),
        Schedule(1, 0, 0),
        store=RunStateStore(folder),
        metrics=full,
        samples=full,
        console=Console(quiet=True),
        config={},
        monitor="none",
    )
    loop.resumed_step = 0
    with pytest.raises(StorageError, match="No space left"):
        loop.run()


def what_counts_nowhere_moves_nothing(folder: Path, parallel: ParallelConfig) -> None:
    """Momentum and weight decay would; a batch that counts on one rank alone moves both."""
    role = build(folder, "untied", parallel)
    train(role, 1)
    before = {name: value.clone() for name, value in tensors(role).items()}
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    whole = make_batch()
    for counting, empty in (([0, 0, 0, 0], 1.0), ([0, 0, 1, 1], 0.0)):
        whole["sample_mask"] = torch.tensor(counting).float()
        share = {key: value.chunk(ranks)[rank] for key, value in whole.items()}
        assert role.training_update(share)["empty"] == empty
        assert role.optimizer is not None
        assert role.optimizer.steps == (1 if empty else 2)
        after = tensors(role)
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        assert bool(moved) == (not empty), moved


def main() -> None:
    folder = Path(sys.argv[1])
    for parallel in PAIRS.values():
        what_counts_nowhere_moves_nothing(folder, parallel)
    for case in CASES:
        for layout, parallel in PAIRS.items():
            continues_to_the_bit(folder, folder / case / layout, case, parallel)
        for before, after in HANDOVERS:
            role = build(folder, case, PAIRS[after])
            restore(folder / case / before, role)
            save(folder / case / f"{before}-{after}", role)
            train(role, 1)
            save(folder / case / f"{before}-{after}", role)
    for layout in PAIRS:
        a_rank_reads_its_own(folder, "untied", layout, layout)
        a_rank_reads_its_own(folder, "untied", layout, "one")
    a_rank_reads_its_own(folder, "critic", "data", "data")
    damage_of_one_share_is_known_to_every_rank(folder / "damage", role)
    a_full_disk_stops_every_rank(folder / "full")
    shutdown_parallel()


if __name__ == "__main__":
    main()
