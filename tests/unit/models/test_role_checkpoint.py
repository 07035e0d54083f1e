"""`save_checkpoint` and what starts from it: weights, optimizer state, tokenizer; one process."""

import pytest
import torch
from batches import ppo_batch
from role_models import assert_equal

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import CriticConfig, ModelConfig, OptimConfig, SchedConfig
from aligner.data.tokenizers.loading import load_tokenizer
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.errors import CheckpointNotFoundError, StorageError, TokenizerError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

ROWS, WIDTH = 4, 12
OPTIM = OptimConfig(lr=1e-3, sched=SchedConfig(name="linear", max_steps=10))
LOSSES = {"policy": PPOPolicyLoss(), "value": PPOValueLoss()}


def make_batch():
    return BatchedDataDict(ppo_batch([WIDTH] * ROWS, [3] * ROWS))


@pytest.fixture(scope="module")
def start(tiny_nemo):
    with open_nemo(tiny_nemo) as checkpoint:
        tokenizer = checkpoint.tokenizer
    model = ModelConfig(
        restore_from_path=str(tiny_nemo), micro_batch_size=2, global_batch_size=ROWS, optim=OPTIM
    )
    cluster = LocalCluster(initialize_parallel())

    def start(role, *, offload_weights=False, precision="32", **kwargs):
        run = RunSettings(precision=precision)
        if role == "policy":
            kwargs.setdefault("init_reference_model", False)
            return Policy(cluster, model, tokenizer, run=run, **kwargs)
        sizes = {"micro_batch_size": 2, "global_batch_size": ROWS}
        critic = CriticConfig(**sizes, optim=OPTIM, offload_weights=offload_weights)
        return Value(cluster, critic, tokenizer, model=model, run=run, **kwargs)

    return start


def update(handle, role, times=1):
    handle.prepare_for_training()
    return [handle.train(make_batch(), LOSSES[role]) for _ in range(times)][-1]


def weights_of(handle):
    return {k: v.clone() for k, v in handle.worker_group.worker.model.whole_weights().items()}


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize(
    ("backend", "precision", "name"),
    [
        ("megatron", "32", "weights.nemo"),
        ("megatron", "bf16", "weights.nemo"),
        ("dtensor", "32", "weights.nemo"),
        # Whose vocabulary is padded to another multiple than that of the `.nemo` it began with.
        ("megatron", "32", "weights"),
        ("dtensor", "32", "weights"),
    ],
)
def test_a_front_continues_where_another_was_saved(role, backend, precision, name, start, tmp_path):
    settings = {"precision": precision, "backend": backend}
    first = start(role, **settings)
    update(first, role, 2)
    weights, optimizer, tokenizer = (str(tmp_path / each) for each in (name, "optim", "tokens"))
    first.save_checkpoint(weights, optimizer, tokenizer_path=tokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {name, "optim", "tokens"}
    second = start(role, **settings, weights_path=weights, optimizer_path=optimizer)
    assert_equal(weights_of(first), weights_of(second))
    # The same loss, gradient norm and place in the schedule.
    assert update(first, role) == update(second, role)
    assert_equal(weights_of(first), weights_of(second))
    own = first.worker_group.worker.model.tokenizer
    assert load_tokenizer(tokenizer).encode("2+3=") == own.encode("2+3=")


def test_weights_alone_begin_a_schedule_anew(start, tmp_path):
    first = start("value")
    update(first, "value", 2)
    first.save_checkpoint(str(tmp_path / "m.nemo"))
    second = start("value", weights_path=str(tmp_path / "m.nemo"))
    assert_equal(weights_of(first), weights_of(second))
    assert update(second, "value")["lr"] == OPTIM.lr
    assert update(first, "value")["lr"] < OPTIM.lr


def test_a_checkpoint_is_loaded_into_a_running_worker(start, tmp_path):
    handle = start("value", precision="bf16")
    update(handle, "value")
    saved = weights_of(handle)
    paths = (str(tmp_path / "m.nemo"), str(tmp_path / "optimizer"))
    handle.save_checkpoint(*paths)
    expected = update(handle, "value")
    update(handle, "value")
    handle.worker_group.worker.load_checkpoint(*paths)
    assert_equal(weights_of(handle), saved)
    assert update(handle, "value") == expected
    # Weights alone: what the optimizer updates are copies in float32, which must follow.
    handle.worker_group.worker.load_checkpoint(paths[0])
    before = weights_of(handle)
    assert_equal(before, saved)
    update(handle, "value")
    moved = max((weights_of(handle)[k].float() - v.float()).abs().max() for k, v in before.items())
    assert moved < 20 * OPTIM.lr


def test_optimizer_state_is_replaced_and_never_half(start, tmp_path, monkeypatch):
    handle = start("value")
    worker, folder = handle.worker_group.worker, tmp_path / "optimizer"
    update(handle, "value")
    handle.save_checkpoint(str(tmp_path / "m.nemo"), str(folder))
    before = (folder / "rank_00000.pt").read_bytes()
    update(handle, "value")

    def full(*args):
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("aligner.checkpoint.run_state.worker_state.save_worker_state", full)
        with pytest.raises(StorageError, match="full"):
            worker.save_checkpoint(str(tmp_path / "m.nemo"), str(folder))
    assert (folder / "rank_00000.pt").read_bytes() == before
    worker.save_checkpoint(str(tmp_path / "m.nemo"), str(folder))
    assert (folder / "rank_00000.pt").read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.nemo", "optimizer"]


def test_what_is_not_there_is_named(start, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"optimizer_path=.*absent does not exist"):
        start("value", optimizer_path=str(tmp_path / "absent"))
    worker = start("value", init_optimizer=False).worker_group.worker
    worker.model.tokenizer = None
    with pytest.raises(TokenizerError, match="critic was built without a tokenizer"):
        worker.save_checkpoint(str(tmp_path / "m.nemo"), tokenizer_path=str(tmp_path / "t"))


def test_offloaded_weights_come_back_bit_by_bit(start, tmp_path, monkeypatch):
    """A host copy of every storage, as on a GPU; on CPU alone nothing would move."""
    plain = start("value")
    parked = start("value", offload_weights=True)
    model = parked.worker_group.worker.model
    storages = [p.untyped_storage() for p in model.gpt.parameters()]
    storages += [p.main_grad.untyped_storage() for p in model.gpt.parameters()]
    monkeypatch.setattr(accelerator, "is_apart", lambda tensor: True)
    for handle in (plain, parked):
        handle.prepare_for_inference()
        handle.values = handle.get_values(make_batch())["values"]
        handle.finish_inference()
    assert torch.equal(plain.values, parked.values)
    assert all(s.nbytes() == 0 for s in storages[: len(storages) // 2])
    results = [update(handle, "value") for handle in (plain, parked)]
    assert results[0] == results[1]
    parked.finish_training()
    assert all(storage.nbytes() == 0 for storage in storages)
    parked.save_checkpoint(str(tmp_path / "m.nemo"), str(tmp_path / "optimizer"))  # while parked
    assert_equal(weights_of(plain), weights_of(parked))
    assert update(plain, "value") == update(parked, "value")
