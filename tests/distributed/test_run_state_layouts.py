"""A run state saved on one layout goes on on any other, optimizer state included.

1. Restoring changes no bit of weights, float32 main weights and Adam moments, wherever they pass.
2. The next update is the one that a single, uninterrupted process makes, within float32 rounding.
3. On the layout that saved, everything after is equal to the bit (checked by the worker).
4. A state of another model, or one that lacks a share, is refused.
5. On the layout that saved, a process reads no file but its own; on another one, of moments and of
   float32 weights only what it updates (checked by the worker).
6. What only rank 0 writes and cannot stops every rank at once (checked by the worker).
"""

import dataclasses
from pathlib import Path

import pytest
import run_state_worker as worker
from newest_state import newest
from ranks import run_ranks

from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.worker_state import SavedShares, load_worker_state
from aligner.errors import CheckpointError

WORKER = Path(worker.__file__)
HANDOVERS = [f"{before}-{after}" for before, after in worker.HANDOVERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One process has trained two updates in each case; two have handed them around."""
    folder = tmp_path_factory.mktemp("layouts")
    worker.write_models(folder)
    for case in worker.CASES:
        role = worker.build(folder, case, worker.ONE)
        worker.train(role, 2)
        worker.save(folder / case / "one", role)
    run_ranks(WORKER, 2, [folder], timeout_s=280)
    return folder


def restored(folder, case, name, step):
    """What one process has after restoring a state; ``step`` says after how many updates."""
    role = worker.build(folder, case, worker.ONE)
    state = RunStateStore(folder / case / name).path(step)
    load_worker_state(worker.worker_of(role), str(state / "role"))
    assert role.optimizer.steps == step
    return worker.tensors(role)


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """After two and after three updates of one process."""
    seen = {}
    for case in worker.CASES:
        role = worker.build(folder, case, worker.ONE)
        worker.train(role, 2)
        two = worker.tensors(role)
        worker.train(role, 1)
        seen[case] = two, worker.tensors(role)
    return seen


@pytest.mark.parametrize("case", worker.CASES)
def test_one_process_continues_to_the_bit(case, tmp_path):
    worker.write_models(tmp_path)
    worker.continues_to_the_bit(tmp_path, tmp_path / case, case, worker.ONE)


@pytest.mark.parametrize("case", worker.CASES)
@pytest.mark.parametrize("handover", HANDOVERS)
def test_no_bit_is_lost_on_the_way(handover, case, folder):
    before = handover.split("-")[0]
    source = restored(folder, case, before, 2)
    worker.check_equal(handover, restored(folder, case, handover, 2), source)


@pytest.mark.parametrize("case", ["untied", "tied"])
@pytest.mark.parametrize("name", ["one", *worker.PAIRS, *HANDOVERS])
def test_training_goes_on_as_if_on_one_process(name, case, folder, uninterrupted):
    two, three = uninterrupted[case]
    step = 3 if "-" in name else 2
    found = restored(folder, case, name, step)
    assert found.keys() == three.keys()
    for key, wanted in (three if step == 3 else two).items():
        scale = wanted.abs().max().clamp(min=1e-3 if key.endswith("weight") else 1e-9)
        assert (found[key] - wanted).abs().max() / scale < 1e-5, key
    weight = "decoder.layers.1.mlp.linear_fc1.weight"
    assert (three[weight] - two[weight]).abs().max() > 1e-4  # there was something to get wrong


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


def test_another_model_and_missing_shares_are_refused(folder):
    latest = newest(RunStateStore(folder / "untied" / "one"))
    states = [*SavedShares(latest / "role", 0)]
    name, piece = next(iter(states[0]["slices"].items()))
    beginning = {kind: tensor[:-1] for kind, tensor in piece["tensors"].items()}
    gap = {**states[0]["slices"], name: {**piece, "tensors": beginning}}
    with pytest.raises(CheckpointError, match=f"weight of {name} from element .* earlier state"):
        worker.build(folder, "untied", worker.ONE).load_run_state([{**states[0], "slices": gap}])
    with pytest.raises(CheckpointError, match="explicit_log_dir"):
        worker.build(folder, "tied", worker.ONE).load_run_state(states)
    role = worker.build(folder, "untied", worker.ONE)
    role.architecture = dataclasses.replace(role.architecture, num_layers=1)
    with pytest.raises(CheckpointError, match=r"unexpected decoder\.layers\.1"):
        role.load_run_state(states)
