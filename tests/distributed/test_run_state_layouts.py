"""A run state saved on one layout goes on on any other, optimizer state included.

1. Restoring changes no bit of weights, float32 main weights and Adam moments, wherever they pass.
2. The next update is the one that a single, uninterrupted process makes, within float32 rounding.
3. On the layout that saved, everything after is equal to the bit.
4. A state of another model, or one that lacks a share, is refused.
5. On the layout that saved, a process reads no file but its own; on another one, of moments and of
   float32 weights only what it updates.
6. What only rank 0 writes and cannot stops every rank at once.
7. With `trainer.deterministic` and dropout everything goes on to the bit, too: of what every
   tensor-parallel rank has (torch's generator) and of what each has a part of (megatron-core's).
"""

import copy
import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import ppo_batch
from layout_worker import TIED_GPT
from newest_state import newest
from ranks import on_ranks
from rich.console import Console
from role_models import load_role

from aligner.algorithms.run.loop import RunLoop, Schedule, StepResult
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.tree import capture_rng, restore_rng
from aligner.checkpoint.run_state.worker_state import SavedShares, ShareWriter, load_worker_state
from aligner.config import OptimConfig, ParallelConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.errors import CheckpointError, DamagedStateError, StorageError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel
from aligner.models.gpt.megatron import state as sharded_state
from aligner.parallel.collectives import gather_objects

LLAMA = dataclasses.replace(TINY_ARCHITECTURE, num_layers=2)
GPT = dataclasses.replace(TIED_GPT, num_layers=2)
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
AROUND = [("tensor", "pipe"), ("pipe", "data"), ("data", "tensor")]
FROM_ONE = [("one", layout) for layout in PAIRS]
HANDOVERS = {"untied": [*FROM_ONE, *AROUND], "tied": AROUND, "critic": AROUND}


def make_batch():
    return ppo_batch([12, 7, 10, 12], [3] * 4)


def build(folder, case, parallel, dropout=None):
    cls, model, precision = CASES[case]
    return load_role(
        cls,
        PPOValueLoss(value_clip=None) if cls is MegatronGPTCriticModel else PPOPolicyLoss(),
        folder / f"{model}.nemo",
        parallel=parallel,
        precision=precision,
        optim=OptimConfig(lr=1e-3, eps=1e-3, weight_decay=0.1),
        micro_batch_size=2,
        dropout=dropout,
    )


def train(role, updates):
    """Metrics of so many updates."""
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    share = {key: value.chunk(ranks)[rank] for key, value in make_batch().items()}
    role.prepare_for_training()
    return [role.training_update(share) for _ in range(updates)]


def store(folder, role):
    state = role.parallel
    return RunStateStore(folder, save_top_k=2, rank=state.rank, exchange=gather_objects)


def worker_of(role):
    return SimpleNamespace(
        parallel=role.parallel, state_dict=role.run_state, load_state_dict=role.load_run_state
    )


class Saved:
    """A role as the run loop saves it."""

    def __init__(self, role):
        self.num_shares = role.parallel.world_size
        self._writer = ShareWriter(worker_of(role))

    def begin_saving(self, folder, in_background):
        self._writer.begin(str(folder), in_background)

    def check_saving(self, wait):
        if (failure := self._writer.failure(wait)) is not None:
            raise StorageError(failure)


def save(folder, role, meanwhile=None):
    """Save a state; what happens ``meanwhile`` is not in it."""
    states = store(folder, role)
    saved = {"role": Saved(role)}
    states.save(role.optimizer.steps, {}, roles=saved, in_background=meanwhile is not None)
    if meanwhile is not None:
        meanwhile()
        states.finish()


def restore(folder, role):
    load_worker_state(worker_of(role), str(newest(store(folder, role)) / "role"))


def tensors(role):
    """Weights of this process, and what its optimizer keeps of them."""
    names = {parameter: name for name, parameter in role.gpt.named_parameters()}
    found = {name: parameter.detach().clone() for parameter, name in names.items()}
    for owned in role.optimizer.owned_slices():
        kept = {"main": owned.main.detach(), **owned.moments()}
        found |= {f"{names[owned.parameter]} {kind}": t.clone() for kind, t in kept.items()}
    return found


def check_equal(case, seen, wanted):
    assert seen.keys() == wanted.keys(), case
    odd = [name for name, value in wanted.items() if not torch.equal(seen[name], value)]
    assert not odd, (case, odd)


def continues_to_the_bit(models, folder, case, parallel):
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


def continues_with_dropout(models, folder, parallel):
    role = build(models, "untied", parallel, dropout=0.2)
    before = copy.deepcopy(capture_rng(accelerator.rng_state))
    train(role, 2)
    save(folder, role)
    metrics = train(role, 2)

    again = build(models, "untied", parallel, dropout=0.2)
    restore(folder, again)
    assert train(again, 2) == metrics
    check_equal("dropout", tensors(again), tensors(role))

    # With the random states of another time, and without dropout, it is not the same.
    for dropout in (0.2, 0.0):
        other = build(models, "untied", parallel, dropout)
        restore(folder, other)
        restore_rng(before, accelerator.set_rng_state)
        assert train(other, 2) != metrics


def mapped_bytes(folder):
    """Bytes of files below ``folder`` that this process has in memory because it read them."""
    found = {}
    name = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            name = line.split()[-1]
        elif line.startswith("Rss:") and name is not None and name.startswith(str(folder)):
            found[Path(name).name] = found.get(Path(name).name, 0) + 1024 * int(line.split()[1])
    return found


def a_rank_reads_its_own(folder, case, layout, before):
    """Restored on its layout a rank maps its own file alone; on another, it reads what it needs."""
    role = build(folder, case, PAIRS[layout])
    path = newest(store(folder / case / before, role)) / "role"
    rank, asked = role.parallel.rank, []
    real = sharded_state._SavedRole._saved

    def counting(saved, name, kind, index, place):
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


def damage_of_one_share_is_known_to_every_rank(folder, role):
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


def a_full_disk_stops_every_rank(folder):
    """What rank 0 cannot write is known to its peer before it waits for anything else."""

    def write(*metrics):
        assert not torch.distributed.get_rank()
        raise StorageError("No space left on device")

    def idle(step, timers):
        return StepResult({})

    loop = RunLoop(
        SimpleNamespace(is_out_of_data=False, step=idle, validate=idle),
        Schedule(1, 0, 0),
        store=RunStateStore(folder),
        metrics=SimpleNamespace(write=write),
        console=Console(quiet=True),
        config={},
        monitor="none",
    )
    loop.resumed_step = 0
    with pytest.raises(StorageError, match="No space left"):
        loop.run()


def what_counts_nowhere_moves_nothing(folder, parallel):
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


def hand_around(folder):
    """Two processes restore one's states in each layout, train, and hand over to one another."""
    for parallel in PAIRS.values():
        what_counts_nowhere_moves_nothing(folder, parallel)
    for case in CASES:
        for layout, parallel in PAIRS.items():
            continues_to_the_bit(folder, folder / case / layout, case, parallel)
        for before, after in HANDOVERS[case]:
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
    accelerator.make_deterministic()
    for is_split in (False, True):
        parallel = ParallelConfig(tensor=2, sequence_parallel=is_split)
        continues_with_dropout(folder, folder / f"dropout {is_split}", parallel)


HANDED_OVER = [
    (case, f"{before}-{after}") for case, pairs in HANDOVERS.items() for before, after in pairs
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    for name, architecture in MODELS.items():
        weights = random_weights(architecture, scale=0.1)
        save_nemo(folder / f"{name}.nemo", weights, architecture, byte_level_tokenizer().files())
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """What one process has after two and after three updates; two have handed its states around."""
    seen = {}
    for case in CASES:
        role = build(folder, case, ONE)
        train(role, 2)
        save(folder / case / "one", role)
        two = tensors(role)
        train(role, 1)
        seen[case] = two, tensors(role)
    on_ranks(2, hand_around, folder)
    return seen


def restored(folder, case, name, step):
    """What one process has after restoring a state; ``step`` says after how many updates."""
    role = build(folder, case, ONE)
    state = RunStateStore(folder / case / name).path(step)
    load_worker_state(worker_of(role), str(state / "role"))
    assert role.optimizer.steps == step
    return tensors(role)


@pytest.mark.parametrize(("case", "handover"), HANDED_OVER)
def test_no_bit_is_lost_and_training_goes_on(case, handover, folder, uninterrupted):
    before = handover.split("-")[0]
    source = restored(folder, case, before, 2)
    check_equal(handover, restored(folder, case, handover, 2), source)
    if case == "critic":  # rounding of bf16
        return
    two, three = uninterrupted[case]
    for found, wanted in ((source, two), (restored(folder, case, handover, 3), three)):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            scale = value.abs().max().clamp(min=1e-3 if key.endswith("weight") else 1e-9)
            assert (found[key] - value).abs().max() / scale < 1e-5, key
    weight = "decoder.layers.1.mlp.linear_fc1.weight"
    assert (three[weight] - two[weight]).abs().max() > 1e-4  # there was something to get wrong


@pytest.mark.usefixtures("uninterrupted")
def test_moments_are_shared_out_over_data_parallel_ranks(folder):
    """Neither rank wrote all of it: together they hold each element once."""
    states = SavedShares(folder / "untied" / "data" / "step_000002" / "role", 0)
    counts = [
        sum(piece["tensors"]["exp_avg"].numel() for piece in state["slices"].values())
        for state in states
    ]
    total = sum(
        value.numel()
        for name, value in restored(folder, "untied", "one", 2).items()
        if name.endswith(" exp_avg")
    )
    assert sum(counts) == total
    assert max(counts) < 0.6 * total


@pytest.mark.usefixtures("uninterrupted")
def test_another_model_and_missing_shares_are_refused(folder):
    latest = newest(RunStateStore(folder / "untied" / "one"))
    states = [*SavedShares(latest / "role", 0)]
    name, piece = next(iter(states[0]["slices"].items()))
    beginning = {kind: tensor[:-1] for kind, tensor in piece["tensors"].items()}
    gap = {**states[0]["slices"], name: {**piece, "tensors": beginning}}
    with pytest.raises(CheckpointError, match=f"weight of {name} from element .* earlier state"):
        build(folder, "untied", ONE).load_run_state([{**states[0], "slices": gap}])
    with pytest.raises(CheckpointError, match="explicit_log_dir"):
        build(folder, "tied", ONE).load_run_state(states)
    role = build(folder, "untied", ONE)
    role.architecture = dataclasses.replace(role.architecture, num_layers=1)
    with pytest.raises(CheckpointError, match=r"unexpected decoder\.layers\.1"):
        role.load_run_state(states)
