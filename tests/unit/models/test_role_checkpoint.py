"""`save_checkpoint` and what starts from it: weights, optimizer state, tokenizer; one process."""

import dataclasses

import pytest
import torch
from batches import ppo_batch

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
    """Starts a handle of either role on one process."""
    with open_nemo(tiny_nemo) as checkpoint:
        tokenizer = checkpoint.tokenizer
    model = ModelConfig(
        restore_from_path=str(tiny_nemo), micro_batch_size=2, global_batch_size=ROWS, optim=OPTIM
    )
    critic = CriticConfig(micro_batch_size=2, global_batch_size=ROWS, optim=OPTIM)
    cluster = LocalCluster(initialize_parallel())

    def start(role, *, section=critic, run=None, **kwargs):
        run = run or RunSettings()
        if role == "policy":
            kwargs.setdefault("init_reference_model", False)
            return Policy(cluster, model, tokenizer, run=run, **kwargs)
        return Value(cluster, section, tokenizer, model=model, run=run, **kwargs)

    start.critic = critic
    return start


def update(handle, role, times=1):
    handle.prepare_for_training()
    return [handle.train(make_batch(), LOSSES[role]) for _ in range(times)][-1]


def weights_of(handle):
    return {k: v.clone() for k, v in handle.worker_group.worker.model.whole_weights().items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize(
    ("backend", "precision"), [("megatron", "32"), ("megatron", "bf16"), ("dtensor", "32")]
)
def test_a_front_continues_where_another_was_saved(role, backend, precision, start, tmp_path):
    settings = {"run": RunSettings(precision=precision), "backend": backend}
    first = start(role, **settings)
    update(first, role, 2)
    paths = {name: str(tmp_path / name) for name in ("optimizer", "tokenizer")}
    first.save_checkpoint(
        str(tmp_path / "m.nemo"), paths["optimizer"], tokenizer_path=paths["tokenizer"]
    )
    settings |= {"weights_path": str(tmp_path / "m.nemo"), "optimizer_path": paths["optimizer"]}
    second = start(role, **settings)
    assert_equal(weights_of(first), weights_of(second))
    one, other = update(first, role), update(second, role)
    assert one == other  # the same loss, gradient norm and place in the schedule
    assert_equal(weights_of(first), weights_of(second))
    tokenizer = load_tokenizer(paths["tokenizer"])
    assert tokenizer.encode("2+3=") == first.worker_group.worker.model.tokenizer.encode("2+3=")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.nemo", "optimizer", "tokenizer"]


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_front_continues_from_a_hugging_face_directory(role, backend, start, tmp_path):
    """Whose vocabulary is padded to another multiple than that of the `.nemo` it began with."""
    first = start(role, backend=backend)
    update(first, role, 2)
    paths = {f"{name}_path": str(tmp_path / name) for name in ("weights", "optimizer")}
    first.save_checkpoint(*paths.values())
    assert (tmp_path / "weights" / "config.json").is_file()
    second = start(role, backend=backend, **paths)
    assert_equal(weights_of(first), weights_of(second))
    assert update(first, role) == update(second, role)
    assert_equal(weights_of(first), weights_of(second))


def test_weights_alone_begin_a_schedule_anew(start, tmp_path):
    first = start("value")
    update(first, "value", 2)
    first.save_checkpoint(str(tmp_path / "m.nemo"))
    second = start("value", weights_path=str(tmp_path / "m.nemo"))
    assert_equal(weights_of(first), weights_of(second))
    assert update(second, "value")["lr"] == OPTIM.lr
    assert update(first, "value")["lr"] < OPTIM.lr


def test_a_checkpoint_is_loaded_into_a_running_worker(start, tmp_path):
    handle = start("value", run=RunSettings(precision="bf16"))
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


def test_without_the_suffix_it_is_a_hugging_face_directory(start, tmp_path):
    from aligner.checkpoint.hf.model_folder import read_hf

    handle = start("policy", init_optimizer=False)
    handle.save_checkpoint(str(tmp_path / "hf"))
    read = read_hf(tmp_path / "hf")
    assert_equal(weights_of(handle), dict(read.weights))
    assert (tmp_path / "hf" / "tokenizer.json").exists()


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
    parked = start("value", section=dataclasses.replace(start.critic, offload_weights=True))
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


def test_moving_to_the_host_that_it_is_on_moves_nothing(start):
    worker = start("value").worker_group.worker
    places = [p.data_ptr() for p in worker.model.gpt.parameters()]
    assert worker.move_model(worker.model.model, "cpu") is worker.model.model
    worker.move_optimizer("cpu")
    worker.move_model(worker.model.model, "cpu", move_grads=False)
    assert [p.data_ptr() for p in worker.model.gpt.parameters()] == places
