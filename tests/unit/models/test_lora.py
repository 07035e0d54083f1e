"""Adapters on one process: the formula, what is trained, and every way in which weights leave."""

import dataclasses

import pytest
import torch
from batches import ppo_batch
from reference_gpt import reference_logits
from role_models import assert_equal, check_reference, check_resumed, fill_head, gradients, updated

from aligner.checkpoint.adapters import (
    Adapters,
    MergedWeights,
    adapter_shapes,
    read_adapters,
    save_adapters,
)
from aligner.checkpoint.gpt_weights import GatheredWeights
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import LengthParams, LoraConfig, OptimConfig, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTRewardModel,
    load_from_nemo,
)
from aligner.models.gpt.lora import LoraColumnParallelLinear, LoraRowParallelLinear, TokenDropout
from aligner.models.gpt.megatron.build import transformer_config
from aligner.models.gpt.megatron.reward import SharedBackboneRewardModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

LORA = LoraConfig(adapter_dim=4, alpha=6.0)
ROWS = 4


def make_batch():
    return ppo_batch([14, 9, 12, 6], [3] * ROWS)


def filled(lora=LORA, seed=4):
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(TINY_ARCHITECTURE, lora)
    tensors = {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    return Adapters(lora, tensors)


@pytest.fixture
def load(tiny_nemo):
    def load(cls=MegatronGPTActorModel, **changes):
        settings = RoleSettings(
            optim=OptimConfig(lr=1e-2), lora=LORA, micro_batch_size=2, gradient_clip_val=0.0
        )
        return load_from_nemo(cls, dataclasses.replace(settings, **changes), restore_path=tiny_nemo)

    return load


def trained(load, updates=2, loss=None, **changes):
    role = load(**changes)
    updated(role, loss or PPOPolicyLoss(entropy_bonus=0.01), make_batch(), updates)
    role.prepare_for_inference()
    return role


@pytest.fixture
def saved(tmp_path):
    """A file of adapters whose B is not zero."""
    save_adapters(tmp_path / "a.lora.safetensors", filled())
    return tmp_path / "a.lora.safetensors"


@pytest.mark.parametrize("cls", [LoraColumnParallelLinear, LoraRowParallelLinear])
def test_forward_and_gradients_by_hand(cls):
    """W = [[1, 2], [3, 4]], A = [1, -1], B = [2, 0], scale 3, of x = [1, 2]."""
    initialize_parallel()
    options = {"gather_output": False} if cls is LoraColumnParallelLinear else {}
    if cls is LoraRowParallelLinear:
        options = {"input_is_parallel": True}
    linear = cls(
        2,
        2,
        config=transformer_config(TINY_ARCHITECTURE),
        init_method=torch.nn.init.zeros_,
        bias=False,
        skip_bias_add=False,
        lora=LoraConfig(adapter_dim=1, alpha=3.0),
        **options,
    )
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        linear.lora.a.copy_(torch.tensor([[1.0, -1.0]]))
        linear.lora.b.copy_(torch.tensor([[2.0], [0.0]]))
    linear.weight.requires_grad_(False)
    x = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    y, _ = linear(x)
    assert y.flatten().tolist() == [5.0 - 6.0, 11.0]
    y.backward(torch.tensor([[[1.0, 10.0]]]))
    assert linear.lora.a.grad.tolist() == [[6.0, 12.0]]
    assert linear.lora.b.grad.tolist() == [[-3.0], [-30.0]]
    assert x.grad.flatten().tolist() == [31.0 + 6.0, 42.0 - 6.0]
    assert linear.weight.grad is None
    merged = linear.lora.merged_into(linear.weight)
    assert merged.tolist() == [[1.0 + 6.0, 2.0 - 6.0], [3.0, 4.0]]


def test_logits_are_those_of_the_merged_weights_by_another_implementation(load, saved):
    tensors, plain, batch = filled().tensors, load(lora=None), make_batch()
    weights = dict(plain.whole_weights())
    for linear in {name.rsplit(".lora.", 1)[0] for name in tensors}:
        a, b = (tensors[f"{linear}.lora.{kind}"].double() for kind in "ab")
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"].double() + 6.0 / 4 * b @ a
    logits = reference_logits(weights, TINY_ARCHITECTURE, batch["input_ids"])
    logprobs = logits[..., : TINY_ARCHITECTURE.vocab_size].log_softmax(-1)
    tokens = batch["input_ids"][:, 1:, None]
    expected = logprobs[:, :-1].gather(-1, tokens)[..., 0] * batch["token_mask"][:, 1:]
    role = load(adapters_path=str(saved))
    assert (role.get_logprobs(batch)[:, 1:] - expected).abs().max() < 2e-5
    assert (plain.get_logprobs(batch)[:, 1:] - expected).abs().max() > 1e-2


def test_fresh_adapters_change_nothing_and_depend_on_the_seed_alone(load):
    torch.manual_seed(1)
    role = load()
    torch.manual_seed(2)
    again, other = load(), load(seed=7)
    batch = make_batch()
    assert torch.equal(role.get_logprobs(batch), load(lora=None).get_logprobs(batch))
    one, two, three = (each.adapters.gather() for each in (role, again, other))
    for name, value in one.items():
        assert torch.equal(value, two[name])
        assert torch.equal(value, three[name]) == name.endswith(".lora.b")  # which are zero


def linears_of(role):
    names = (name for name, p in role.gpt.named_parameters() if p.requires_grad)
    return {name.split(".", 3)[-1].rsplit(".", 2)[0] for name in names}


@pytest.mark.parametrize(
    ("targets", "linears"),
    [
        (("attention_dense", "mlp_fc2"), {"self_attention.linear_proj", "mlp.linear_fc2"}),
        (("attention",), {"self_attention.linear_qkv", "self_attention.linear_proj"}),
    ],
)
def test_targets(load, targets, linears):
    role = load(lora=LoraConfig(target_modules=targets, adapter_dim=2))
    assert linears_of(role) == linears
    assert set(adapter_shapes(TINY_ARCHITECTURE, role.settings.lora)) == set(role.adapters.gather())


@pytest.mark.parametrize(
    ("cls", "loss", "heads"),
    [(MegatronGPTActorModel, None, 0), (MegatronGPTCriticModel, PPOValueLoss(), 2)],
)
def test_only_adapters_and_heads_have_buffers_and_change(load, cls, loss, heads):
    plain, role = load(cls, lora=None), trained(load, cls=cls, loss=loss)
    learning = [p for p in role.gpt.parameters() if p.requires_grad]
    assert len(learning) == 4 * 4 * 2 + heads
    size = sum(parameter.numel() for parameter in learning)
    assert sum(buffer.grad_data.numel() for buffer in role.model.buffers) < size + 1024
    optimizers = role.optimizer.inner.chained_optimizers
    assert sum(len(part.optimizer.state) for part in optimizers) == len(learning)
    frozen = {n: p for n, p in role.gpt.named_parameters() if not p.requires_grad}
    assert all(not hasattr(parameter, "main_grad") for parameter in frozen.values())
    before = {n: p for n, p in plain.gpt.named_parameters() if "rm_head" not in n}
    assert_equal(frozen, before)
    merged, weights = role.whole_weights(), plain.whole_weights()
    assert merged.keys() == weights.keys()
    adapted = "decoder.layers.0.mlp.linear_fc2.weight"
    assert not torch.equal(merged[adapted], weights[adapted])


def test_recomputed_layers_have_the_same_gradients(load, saved):
    """The first layer reads frozen embeddings, so recomputation must be told that it learns."""
    found = {}
    for recompute in (None, "full", "selective"):
        role = trained(load, 0, adapters_path=str(saved), recompute=recompute)
        role.prepare_for_training()
        role.get_loss_and_metrics(make_batch(), forward_only=False)
        found[recompute] = gradients(role)
    for name, value in found[None].items():
        assert value.abs().max() > 1e-6, name
        for recompute in ("full", "selective"):
            difference = (found[recompute][name] - value).abs().max()
            assert difference < 1e-5 * value.abs().max(), (recompute, name)


@pytest.mark.parametrize("begins_with_adapters", [False, True])
def test_the_reference_is_the_beginning_without_a_second_model(load, saved, begins_with_adapters):
    role, batch = load(adapters_path=str(saved) if begins_with_adapters else None), make_batch()
    check_reference(role, batch)
    assert role.reference.gpt is None
    initial = role.reference._initial
    assert (initial is not None) == begins_with_adapters
    if initial is not None:
        adapters = [p for n, p in role.gpt.named_parameters() if ".lora." in n]
        assert all(one is other for one, other in zip(initial._parameters, adapters, strict=True))


def test_sampling_engines_and_files_get_merged_weights(load, tmp_path, tiny_nemo):
    role = trained(load)
    batch = make_batch()
    role.save_to(str(tmp_path / "merged.nemo"))
    role.save_adapters(tmp_path / "beside.lora.safetensors")
    plain = load_from_nemo(MegatronGPTActorModel, restore_path=tmp_path / "merged.nemo")
    assert (plain.get_logprobs(batch) - role.get_logprobs(batch)).abs().max() < 1e-5
    adapters = read_adapters(tmp_path / "beside.lora.safetensors", TINY_ARCHITECTURE)
    gathered = GatheredWeights(role.gpt, role.architecture)
    with open_nemo(tiny_nemo) as base, open_nemo(tmp_path / "merged.nemo") as saved:
        assert_equal(dict(MergedWeights(base.weights, adapters)), dict(saved.weights))
        assert_equal({name: gathered[name].cpu() for name in gathered}, dict(saved.weights))
    again = load(adapters_path=str(tmp_path / "beside.lora.safetensors"))
    assert torch.equal(again.get_logprobs(batch), role.get_logprobs(batch))


def test_what_is_drawn_is_what_the_merged_model_draws(load):
    role, plain, fresh = trained(load), load(lora=None), load(lora=None)
    plain.load_whole_weights(role.whole_weights())
    prompts, rows, drawn = make_batch()["input_ids"][:, :4], torch.arange(ROWS), []
    for each in (role, plain, fresh):
        each.configure_generation(LengthParams(max_length=16), SamplingParams(), 3)
        drawn.append(each.generator.sample(prompts, torch.full_like(rows, 4), rows, seed=1))
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)
    assert torch.equal(drawn[0].logprobs, drawn[1].logprobs)
    assert not torch.equal(drawn[0].logprobs[:, :5], drawn[2].logprobs[:, :5])
    # In the pass that trains, the adapters stand beside the weights: the same but for rounding.
    mask = (drawn[0].logprobs != 0).float()
    columns = {"input_ids": drawn[0].tokens, "input_lengths": drawn[0].lengths, "token_mask": mask}
    assert (role.get_logprobs(columns) - drawn[0].logprobs).abs().max() < 1e-5


def test_a_run_state_holds_what_is_trained_and_restores_it_to_the_bit(load):
    role, again = trained(load, 1), load()
    state = check_resumed(role, again, make_batch())
    assert set(state["slices"]) == set(adapter_shapes(TINY_ARCHITECTURE, LORA))
    assert_equal(role.adapters.gather(), again.adapters.gather())


def test_a_run_state_of_another_way_to_learn_is_refused(load):
    with_adapters, without = trained(load, 0).run_state(), trained(load, 0, lora=None).run_state()
    with pytest.raises(CheckpointError, match=r"saved without adapters.*peft_scheme is now"):
        trained(load, 0).load_run_state([without])
    with pytest.raises(CheckpointError, match=r"saved with adapters, .*peft_scheme is now null"):
        trained(load, 0, lora=None).load_run_state([with_adapters])
    other = trained(load, 0, lora=LoraConfig(target_modules=("mlp",), adapter_dim=4))
    with pytest.raises(CheckpointError, match=r"model\.peft\.lora_tuning: unexpected"):
        other.load_run_state([with_adapters])


def test_adapters_of_another_form_or_model_are_refused(load, saved, tmp_path):
    def changed(**changes):
        load(lora=dataclasses.replace(LORA, **changes), adapters_path=str(saved))

    for changes, message in (
        ({"adapter_dim": 8}, r"adapter_dim=8, but .* trained with 4"),
        ({"alpha": 4.0}, r"alpha=4\.0, but .* Set alpha=6\.0"),
        ({"target_modules": ("mlp",)}, r"Set target_modules=\[all\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            changed(**changes)
    changed(adapter_dropout=0.5)
    for changes, message in (
        ({"num_layers": 2}, r"another model: unexpected decoder\.layers\.2"),
        ({"ffn_hidden_size": 256}, "has shape"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_adapters(saved, dataclasses.replace(TINY_ARCHITECTURE, **changes))
    saved.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="is not an adapters file"):
        read_adapters(saved, TINY_ARCHITECTURE)
    with pytest.raises(CheckpointNotFoundError, match="peft_scheme=lora"):
        read_adapters(tmp_path / "none", TINY_ARCHITECTURE)


def test_a_reward_model_in_the_critics_body_speaks_without_the_critics_adapters(load, tmp_path):
    path = tmp_path / "reward.nemo"
    original = load(MegatronGPTRewardModel, lora=None, optim=None, seed=9)
    fill_head(original, std=0.1)
    with torch.no_grad():
        for parameter in original.gpt.decoder.parameters():
            parameter.mul_(1.1)  # not the critic's frozen weights
    original.save_to(str(path))
    critic = trained(load, cls=MegatronGPTCriticModel, loss=PPOValueLoss())
    batch = make_batch()
    values = critic.get_values(batch)
    with open_nemo(path) as checkpoint:
        shared = SharedBackboneRewardModel.in_critic(
            critic, checkpoint, settings=RoleSettings(), tokenizer=checkpoint.tokenizer
        )
    assert torch.equal(shared.infer(batch), original.infer(batch))
    assert torch.equal(critic.get_values(batch), values)


def test_a_mixture_of_experts_takes_adapters_in_its_attention(load):
    experts = dataclasses.replace(TINY_ARCHITECTURE, num_moe_experts=4)
    with pytest.raises(ConfigError, match=r"target_modules=\[attention\]"):
        adapter_shapes(experts, LORA)
    names = adapter_shapes(experts, LoraConfig(target_modules=("attention",)))
    assert len(names) == 4 * 2 * 2
    latent = dataclasses.replace(experts, kv_lora_rank=8, value_channels=4)
    for targets in ("all", "attention", "attention_qkv"):
        with pytest.raises(ConfigError, match=r"target_modules=\[attention_dense\]"):
            adapter_shapes(latent, LoraConfig(target_modules=(targets,)))
    shapes = adapter_shapes(latent, LoraConfig(target_modules=("attention_dense",), adapter_dim=4))
    heads = TINY_ARCHITECTURE.num_attention_heads
    assert shapes["decoder.layers.3.self_attention.linear_proj.lora.a"] == (4, heads * 4)


def test_frozen_routers_leave_the_base_frozen(tmp_path):
    experts = dataclasses.replace(TINY_ARCHITECTURE, num_moe_experts=2, moe_router_topk=2)
    path = tmp_path / "moe.nemo"
    save_nemo(path, random_weights(experts), experts, byte_level_tokenizer().files())
    lora = LoraConfig(adapter_dim=2, target_modules=("attention",))
    settings = RoleSettings(optim=OptimConfig(lr=1e-2), lora=lora, freeze_moe_router=True)
    role = load_from_nemo(MegatronGPTActorModel, settings, restore_path=path)
    learned = {n for n, each in role.gpt.named_parameters() if each.requires_grad}
    assert learned
    assert all(".lora." in name for name in learned)


def test_dropout_keeps_the_mean_and_knows_tokens_not_places():
    dropout = TokenDropout(0.25, seed=3)
    ids = torch.randint(0, 200, (6, 40), generator=torch.Generator().manual_seed(1))

    def seen(ids, stream=11, part=0, parts=1, first=0, features=64, lengths=40):
        rows, width = ids.shape
        held = torch.arange(ids.numel()).view_as(ids)
        with dropout.of_pass(ids, torch.full((rows,), lengths), held):
            ones = torch.ones(width // parts, rows, features)
            return dropout(ones, stream, part=part, parts=parts, first=first)

    whole = seen(ids)
    assert whole.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert (whole == 0).float().mean() == pytest.approx(0.25, abs=0.01)  # of 15,360 draws
    assert (whole == seen(ids, stream=12)).float().mean() < 0.7
    assert torch.equal(seen(ids, first=32, features=32), whole[..., 32:])
    assert torch.equal(seen(ids, part=1, parts=2), whole[20:])
    # Sequences that begin alike drop alike, in any row and padding.
    assert torch.equal(seen(ids[2:4, :30], lengths=30), whole[:30, 2:4])
    padded = torch.nn.functional.pad(ids[2:4], (0, 9))
    assert torch.equal(seen(padded)[:40], whole[:, 2:4])
    dropout.update = 1
    assert not torch.equal(seen(ids), whole)


def test_dropout_is_over_outside_training(load):
    dropping = load(lora=dataclasses.replace(LORA, adapter_dropout=0.5))
    batch = make_batch()
    dropping.prepare_for_inference()
    assert torch.equal(dropping.get_logprobs(batch), load().get_logprobs(batch))
