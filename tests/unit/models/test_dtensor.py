"""Actor and critic on transformers models, sharded over one process.

Layouts are in `tests/distributed/test_dtensor_layouts`, recomputation in `test_any_model`.
"""

import dataclasses
import math
from functools import partial

import pytest
import torch
from role_models import write_tokenizer
from safetensors.torch import load_file
from test_any_model import logprobs_of_folder
from test_any_model import make_batch as any_batch
from test_roles import LENGTHS, make_batch, make_critic, settings, trained
from test_roles import load as load_megatron
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from aligner.checkpoint.convert import hf_to_nemo
from aligner.checkpoint.model_source import open_model
from aligner.config import CriticConfig, ModelConfig, OptimConfig, ParallelConfig, SchedConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import CheckpointError, ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.dtensor.plan import check_backend
from aligner.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from aligner.models.value.workers.dtensor_value_worker_v2 import DTensorValueWorkerV2
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration


def load(cls, path, **changes):
    with open_model(path) as source:
        return cls(source, settings(**changes), initialize_parallel(), source.tokenizer)


def start(kind, path, *arguments, **more):
    with open_model(path) as source:
        return kind(*arguments, source.tokenizer, parallel=initialize_parallel(), **more)


def start_policy(path, **options):
    section = ModelConfig(restore_from_path=str(path), **options)
    return start(DTensorPolicyWorkerV2, path, section, init_reference_model=False)


critic_with_head = partial(make_critic, backend="dtensor")


def test_a_policy_travels_as_nemo_and_as_hugging_face(tiny_nemo, tmp_path):
    worker, hf = start_policy(tiny_nemo), tmp_path / "hf"
    worker.save_checkpoint(str(tmp_path / "copy.nemo"))
    assert (tmp_path / "copy.nemo").read_bytes() == tiny_nemo.read_bytes()
    worker.save_checkpoint(str(hf))
    loaded, batch = AutoModelForCausalLM.from_pretrained(hf), make_batch()
    ids, mask = batch["input_ids"], batch["token_mask"].bool()
    with torch.no_grad():
        expected = loaded(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])
    logprobs = worker.model.get_logprobs(batch)
    assert torch.allclose(logprobs[:, 1:][mask[:, 1:]], expected.squeeze(2)[mask[:, 1:]], atol=1e-5)
    assert logprobs[~mask].abs().max() == 0
    assert torch.equal(load(DTensorActorModel, hf).get_logprobs(batch), logprobs)
    # Weights are sent to engines under Hugging Face's names.
    saved, names = load_file(hf / "model.safetensors"), worker.hf_weight_names()
    assert set(names) == set(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in worker.hf_weights(names[:9]))
    # The weights of a file replace trained ones.
    trained(worker.model, PPOPolicyLoss())
    assert not torch.equal(worker.model.get_logprobs(batch), logprobs)
    with open_model(tiny_nemo) as source:
        worker.model.load_whole_weights(source.weights)
    assert torch.equal(worker.model.get_logprobs(batch), logprobs)


def test_a_critic_travels_with_its_head(tiny_nemo, tmp_path):
    model = ModelConfig(restore_from_path=str(tiny_nemo))
    worker = start(DTensorValueWorkerV2, tiny_nemo, CriticConfig(), model=model)
    critic = worker.model = critic_with_head(tiny_nemo)
    values = critic.get_values(make_batch())
    for path in (tmp_path / "critic.nemo", tmp_path / "critic_hf"):
        worker.save_checkpoint(str(path))
        assert torch.equal(load(DTensorCriticModel, path).get_values(make_batch()), values)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic_hf").eval()
    with torch.no_grad():
        raw = loaded(make_batch()["input_ids"]).logits.squeeze(-1)
    for row, length in enumerate(LENGTHS):
        assert torch.allclose(values[row, 1:length], raw[row, : length - 1], atol=1e-5)
        assert values[row, 0] == 0
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(DTensorActorModel, tmp_path / "critic.nemo")


@pytest.mark.parametrize(
    "optim",
    [
        OptimConfig(lr=1e-3, eps=1e-3, weight_decay=0.1, sched=SchedConfig(warmup_steps=1)),
        OptimConfig(name="sgd", lr=1e-2, weight_decay=0.1),
    ],
    ids=["adam", "sgd"],
)
def test_optimizers_do_as_megatrons_do(optim, tiny_nemo):
    options = {"optim": optim, "gradient_clip_val": 0.5}
    roles = [load(DTensorActorModel, tiny_nemo, **options), load_megatron(tiny_nemo, **options)]
    reports = [trained(role, PPOPolicyLoss(), updates=2) for role in roles]
    for mine, theirs in zip(*reports, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    weights = (role.whole_weights() for role in roles)
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-5)


def test_bf16_keeps_float32_weights_and_head(tiny_nemo):
    exact = critic_with_head(tiny_nemo)
    critic = critic_with_head(tiny_nemo, precision="bf16")
    assert all(shard.local.dtype == torch.float32 for shard in critic.shards)
    difference = critic.get_values(make_batch()) - exact.get_values(make_batch())
    assert 0 < difference.abs().max() < 0.3
    before = {shard.name: shard.local.clone() for shard in critic.shards}
    report = trained(critic, PPOValueLoss(value_clip=0.2))[0]
    assert math.isfinite(report["grad_norm"])
    # An update of 1e-3 of a weight's size would vanish in bfloat16.
    assert all(not torch.equal(before[shard.name], shard.local) for shard in critic.shards)
    assert critic.whole_weights()["rm_head.weight"].dtype == torch.float32


def test_generation_has_the_weights_of_the_moment(tiny_nemo):
    worker = start_policy(tiny_nemo, optim=OptimConfig(lr=0.1))
    prompts = BatchedDataDict(
        {
            "input_ids": make_batch()["input_ids"][:, :4],
            "input_lengths": torch.full((4,), 4),
            "sample_ids": torch.arange(4),
        }
    )
    first = worker.generate(prompts, seed=1)
    assert torch.equal(worker.generate(prompts, seed=1)["output_ids"], first["output_ids"])
    trained(worker.model, PPOPolicyLoss())
    worker.prepare_for_generation()
    second = worker.generate(prompts, seed=1)
    assert not torch.equal(second["output_ids"], first["output_ids"])
    worker.finish_generation()
    with pytest.raises(ConfigError, match="prepare_for_generation"):
        worker.model.generator.sample(*prompts.values(), seed=1)


@pytest.mark.parametrize("model_type", ["granite", "stablelm"])
def test_a_nemo_of_a_newer_family_scores_as_transformers(model_type, folder_of, tmp_path):
    """Divided logits, or attention that rotates a part of a head."""
    folder, batch = folder_of(model_type, vocab_size=259), any_batch()  # the tokenizer's
    write_tokenizer(folder)
    hf_to_nemo(folder, tmp_path / "model.nemo")
    expected = logprobs_of_folder(folder)
    for packed in (False, True):
        role = load(DTensorActorModel, tmp_path / "model.nemo", sequence_packing=packed)
        torch.testing.assert_close(role.get_logprobs(batch), expected, atol=1e-4, rtol=0)


def test_what_this_backend_does_not_have_is_refused():
    experts = dataclasses.replace(TINY_ARCHITECTURE, num_moe_experts=4, family="mixtral")
    with pytest.raises(ConfigError, match=r"4 experts.*policy\.backend=megatron"):
        check_backend(experts, ParallelConfig())


def test_a_run_state_of_the_other_backend_is_refused(tiny_nemo):
    role = load(DTensorActorModel, tiny_nemo)
    other = load_megatron(tiny_nemo)
    with pytest.raises(CheckpointError, match=r"policy\.backend=dtensor"):
        role.load_run_state([other.run_state()])
    state = role.run_state()
    del state["slices"]["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        role.load_run_state([state])
