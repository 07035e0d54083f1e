"""What the handles ask of their workers, whatever runs them: a group that writes down its calls."""

import dataclasses
import inspect
import pydoc
from types import SimpleNamespace

import pytest
import torch
from batches import ppo_batch

from aligner.config import CriticConfig, DynamicBatchingConfig, ModelConfig, SequencePackingConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.named_sharding import layout_of
from aligner.distributed.workers import LocalFuture
from aligner.errors import ConfigError
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.policy.lm_policy import Policy, PolicyWorker
from aligner.models.reward.reward_model import RewardModel
from aligner.models.value.lm_value import Value

MODEL = ModelConfig(restore_from_path="m.nemo", micro_batch_size=1, global_batch_size=4)
CRITIC = CriticConfig(micro_batch_size=1, global_batch_size=4)
PLANS = {
    "rows": {},
    "packed": {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=64)},
    "dynamic": {"dynamic_batching": DynamicBatchingConfig(enabled=True, train_mb_tokens=64)},
}
TRAINED = {
    "global_loss": 0.5,
    "grad_norm": 2.0,
    "lr": 1e-3,
    "skipped": False,
    "all_mb_metrics": {"loss": [0.4, 0.6]},
}


class Recorder:
    """Two data-parallel workers of a cluster that says what it was asked."""

    sharding_annotations = layout_of(1, 2, 1, 1)

    def __init__(self):
        self.calls = []

    def start_workers(self, worker_class, name_prefix, **kwargs):
        self.started = kwargs
        return self

    def run_all_workers_single_data(self, method_name, **kwargs):
        self.calls.append((method_name, kwargs))
        return LocalFuture([None, None])

    def run_all_workers_sharded_data(self, method_name, data, *args, common_kwargs=None, **axes):
        """A score is the first id that was kept with a token."""
        self.calls.append((method_name, data, common_kwargs))
        if method_name == "train":
            return LocalFuture([TRAINED, TRAINED])
        if method_name == "generate":
            return LocalFuture([generated(3), generated(4)])
        scores = [{"logprobs": shard["kept_ids"][..., 0].float()} for shard in data]
        return LocalFuture(list(map(BatchedDataDict, scores)))

    def get_all_worker_results(self, future):
        return future.get_results()

    def shutdown(self, cleanup_method=None):
        self.calls.append(("group shutdown", cleanup_method))
        return True


def generated(width):
    """A worker's response of one token, in rows of ``width``."""
    return BatchedDataDict(
        {
            "output_ids": torch.ones(1, width, dtype=torch.long),
            "generation_lengths": torch.tensor([1]),
            "unpadded_sequence_lengths": torch.tensor([width]),
            "logprobs": torch.zeros(1, width),
            "is_end": torch.ones(1, dtype=torch.bool),
            "kept_ids": torch.zeros(1, width, 2, dtype=torch.int32),
        }
    )


def handles(cluster, model=MODEL, **kwargs):
    run = RunSettings()
    yield lambda: Policy(cluster, model, None, run=run, **kwargs)
    yield lambda: Value(cluster, CRITIC, None, model=model, run=run, **kwargs)


def batch(rows=8):
    return BatchedDataDict(ppo_batch([4] * rows, [0] * rows))


def test_train_gives_the_published_keys_once():
    for make in handles(cluster := Recorder()):
        handle = make()
        result = handle.train(batch(), PPOValueLoss(), mbs=2)
        assert result == {
            **{key: TRAINED[key] for key in ("grad_norm", "lr", "skipped", "all_mb_metrics")},
            "loss": TRAINED["global_loss"],  # reduced already: not once per worker
        }
        method, shards, kwargs = cluster.calls[-1]
        assert (method, [shard.size for shard in shards]) == ("train", [4, 4])
        assert (kwargs["gbs"], kwargs["mbs"], kwargs["eval_mode"]) == (4, 2, False)


def test_what_is_asked_of_every_worker():
    for make in handles(cluster := Recorder()):
        handle = make()
        for method in (
            "prepare_for_training",
            "finish_training",
            "start_gpu_profiling",
            "stop_gpu_profiling",
        ):
            getattr(handle, method)()
            assert cluster.calls[-1] == (method, {})
        handle.save_checkpoint("/a/m.nemo", tokenizer_path="/a/t")
        paths = {"weights_path": "/a/m.nemo", "tokenizer_path": "/a/t"}
        assert cluster.calls[-1] == ("save_checkpoint", paths)
        assert handle.shutdown()
        assert cluster.calls[-1] == ("group shutdown", "shutdown")


def test_a_declared_verb_is_read_as_the_workers_method():
    declared, written = Policy.get_logprobs, PolicyWorker.get_logprobs
    assert inspect.signature(declared) == inspect.signature(written)
    assert inspect.getdoc(declared) == inspect.getdoc(written)
    shown = pydoc.plain(pydoc.render_doc(Policy))
    assert "get_logprobs(self, data" in shown
    assert "Column t is the log-prob of token t" in shown
    assert "prepare_for_training(self) -> None" in shown


def test_arguments_of_a_declared_verb():
    policy = Policy(cluster := Recorder(), MODEL, None, run=RunSettings())
    policy.prepare_for_training("as NeMo-RL's callers may", timing=True)
    assert cluster.calls[-1] == ("prepare_for_training", {})
    reward = RewardModel(cluster, MODEL, None, RunSettings())
    assert cluster.calls[-1] == ("reward_attributes", {})
    reward.standardize(0.5, std=2.0)
    assert cluster.calls[-1] == ("standardize", {"mean": 0.5, "std": 2.0})
    with pytest.raises(TypeError, match="missing a required argument: 'std'"):
        reward.standardize(0.5)
    assert cluster.calls[-1][0] == "standardize"  # and no worker was called


def test_an_unknown_backend_is_refused_by_its_name():
    for make in handles(Recorder(), backend="fsdp"):
        with pytest.raises(ConfigError, match=r"policy\.backend=fsdp.*megatron, dtensor"):
            make()


def test_packing_and_dynamic_batching_exclude_each_other():
    both = dataclasses.replace(MODEL, **PLANS["packed"], **PLANS["dynamic"])
    for make in handles(cluster := Recorder(), both):
        with pytest.raises(ConfigError, match="exclude each other"):
            make()
        assert not hasattr(cluster, "started")  # before any worker


@pytest.mark.parametrize("plan", PLANS)
def test_recorded_sets_travel_with_their_rows(plan):
    model = dataclasses.replace(MODEL, **PLANS[plan])
    policy = Policy(cluster := Recorder(), model, None, run=RunSettings())
    data = BatchedDataDict(ppo_batch([3, 30, 8, 9, 29, 4, 5, 28], [0] * 8))
    data["input_ids"] = torch.arange(8)[:, None].expand(8, 30).clone()
    data["kept_ids"] = torch.arange(8)[:, None, None].expand(8, 30, 2).int()
    for score in (policy.get_logprobs, policy.get_reference_policy_logprobs):
        assert score(data)["logprobs"][:, 7].tolist() == list(range(8))
    policy.train(data, PPOValueLoss())
    shards = cluster.calls[-1][1]
    rows = torch.cat([shard["input_ids"][:, 0] for shard in shards])
    assert rows.tolist() != list(range(8))  # each worker has rows of both global batches
    kept = torch.cat([shard["kept_ids"][:, 7, 1] for shard in shards])
    assert torch.equal(kept.long(), rows)


def test_shorter_rows_of_another_worker_have_no_set_at_their_padding():
    policy = Policy(Recorder(), MODEL, None, run=RunSettings())
    policy.tokenizer = SimpleNamespace(pad_id=9)
    output = policy.generate(batch(2), seed=1)
    assert output["kept_ids"][:, :, 0].tolist() == [[0, 0, 0, -1], [0, 0, 0, 0]]
    assert output["output_ids"].tolist() == [[1, 1, 1, 9], [1, 1, 1, 1]]
