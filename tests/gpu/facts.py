"""What every role says of one batch on the device of this process, to compare with another device.

`python facts.py reference|dry RESULTS MODELS` writes what the CPU says, or checks in on the dry
device that every part of it runs on GPU tensors. The tests call `compute` for their own device.
"""

import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__" and sys.argv[1] == "dry":
    from aligner_plan.dry.guard import load_guard

    load_guard()

import torch

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import LengthParams, LoraConfig, OptimConfig, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.reward import BradleyTerryLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTRewardModel,
    load_from_nemo,
)
from aligner.models.gpt.role.settings import RoleSettings

# As Qwen2.5 is built, with heads that every attention kernel takes.
ARCHITECTURE = dataclasses.replace(
    TINY_ARCHITECTURE,
    hidden_size=128,
    ffn_hidden_size=256,
    kv_channels=16,
    tie_embeddings=True,
    bias_qkv=True,
    rotary_base=1_000_000.0,
    layernorm_epsilon=1e-6,
    family="qwen2",
)
WINDOW = 12
LENGTHS = (61, 17, 40, 33, 9, 56, 48, 25)
PROMPTS = (20, 4, 12, 16, 3, 20, 16, 8)
ROUNDS = [[0, 3], [3, 5], [5, 8]]  # rows of each pass where lengths decide
NEW_TOKENS = 24
KEPT = SamplingParams(temperature=0.7, top_k=40, top_p=0.9)

ACTOR = (MegatronGPTActorModel, PPOPolicyLoss(entropy_bonus=0.01))
CRITIC = (MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2))
REWARD = (MegatronGPTRewardModel, BradleyTerryLoss())
# By name: role and loss, settings, the model's file, micro-batches.
CASES = {
    "actor": (ACTOR, {}, "plain", 4),
    "critic": (CRITIC, {}, "plain", 4),
    "reward": (REWARD, {}, "plain", 4),
    "packed": (ACTOR, {"sequence_packing": True}, "plain", 4),
    "packed, by tokens": (ACTOR, {"sequence_packing": True}, "plain", ROUNDS),
    "dynamic": (ACTOR, {"sequence_length_round": 16}, "plain", ROUNDS),
    "critic, packed": (CRITIC, {"sequence_packing": True}, "plain", ROUNDS),
    "recompute full": (ACTOR, {"recompute": "full"}, "plain", 4),
    "recompute selective": (ACTOR, {"recompute": "selective"}, "plain", 4),
    "window": (ACTOR, {}, "window", 4),
    "window, packed": (ACTOR, {"sequence_packing": True}, "window", ROUNDS),
    "LoRA": (ACTOR, {"lora": LoraConfig(adapter_dim=4)}, "plain", 4),
    "top-k, top-p": (ACTOR, {"sampling_params": KEPT}, "plain", 4),
}
# What a case must agree with on its own device.
SAME = {
    "packed": "actor",
    "packed, by tokens": "actor",
    "dynamic": "actor",
    "critic, packed": "critic",
    "recompute full": "actor",
    "recompute selective": "actor",
    "window, packed": "window",
}


def write_models(folder):
    for name, window in {"plain": None, "window": WINDOW}.items():
        architecture = dataclasses.replace(ARCHITECTURE, window_size=window)
        weights = random_weights(architecture, seed=5, scale=0.06)
        save_nemo(folder / f"{name}.nemo", weights, architecture, byte_level_tokenizer().files())


def batch():
    """Rows of several lengths on this process's device; the same numbers everywhere."""
    generator = torch.Generator().manual_seed(7)
    width = max(LENGTHS)
    ids = torch.randint(1, 250, (len(LENGTHS), width), generator=generator)
    noise = torch.randn(len(LENGTHS), width, generator=generator)
    position = torch.arange(width)
    lengths, prompts = torch.tensor(LENGTHS), torch.tensor(PROMPTS)
    inside = (position >= prompts[:, None]) & (position < lengths[:, None])
    columns = {
        "input_ids": ids.masked_fill(position >= lengths[:, None], 0),
        "input_lengths": lengths,
        "token_mask": inside.float(),
        "sample_mask": torch.ones(len(LENGTHS)),
        "advantages": noise,
        "returns": noise.flip(0),
        "values": 0.1 * noise,
        "prev_logprobs": torch.full_like(noise, -5.5),
        "generation_logprobs": torch.full_like(noise, -5.5),
    }
    return {name: accelerator.to_device(column) for name, column in columns.items()}


def build(cls, model, **settings):
    """A role that can train; a head and adapters, which begin as nothing, are filled."""
    given = {"length_params": LengthParams(max_length=NEW_TOKENS), **settings}
    settings = RoleSettings(
        optim=OptimConfig(lr=1e-3), micro_batch_size=4, forward_micro_batch_size=4, **given
    )
    role = load_from_nemo(cls, settings, restore_path=model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(role.gpt.named_parameters()):
            if "rm_head" in name or (settings.lora is not None and parameter.requires_grad):
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    role.setup_training()
    return role


def scores(role, data, micro_batches):
    if isinstance(role, MegatronGPTActorModel):
        return role.get_logprobs(data, micro_batches)
    if isinstance(role, MegatronGPTRewardModel):
        return role.infer(data, micro_batches)
    return role.get_values(data, micro_batches)


def facts_of(case, folder, **changes):
    """``scores``, ``loss`` and ``gradients`` by name, of one case."""
    (cls, loss), settings, model, micro_batches = CASES[case]
    role = build(cls, folder / f"{model}.nemo", **settings, **changes)
    data = batch()
    role.prepare_for_inference()
    found = {"scores": scores(role, data, micro_batches)}
    role.finish_inference()
    role.loss_fn = loss
    role.prepare_for_training()
    role.optimizer.zero_grad()
    value, _ = role.get_loss_and_metrics(data, forward_only=False, mbs=micro_batches)
    found["loss"] = torch.tensor(value, dtype=torch.float64)
    found["gradients"] = {
        name: parameter.main_grad.clone()
        for name, parameter in role.gpt.named_parameters()
        if parameter.requires_grad
    }
    return found


def drawn(folder, greedy, **settings):
    """Responses to the batch's prompts: ``tokens``, ``logprobs``, ``lengths``, and the gap of
    each token's log-prob to what the trainer says of it, ``gap``, 0 in prompts.
    """
    settings = {"rollout_micro_batch_size": 6, **settings}  # fewer slots than prompts
    role = build(MegatronGPTActorModel, folder / "plain.nemo", **settings)
    data = batch()
    prompts = torch.tensor(PROMPTS, device=data["input_ids"].device)
    text = data["input_ids"][:, : max(PROMPTS)].contiguous()
    role.prepare_for_inference()
    rows = torch.arange(len(PROMPTS), device=text.device)
    output = role.generator.sample(text, prompts, rows, seed=11, greedy=greedy)
    position = torch.arange(output.tokens.shape[1], device=text.device)
    mask = (position >= prompts[:, None]) & (position < output.lengths[:, None])
    trained = role.get_logprobs(
        {"input_ids": output.tokens, "input_lengths": output.lengths, "token_mask": mask.float()}
    )
    return {
        "tokens": output.tokens,
        "lengths": output.lengths,
        "logprobs": output.logprobs,
        "gap": trained - output.logprobs,
    }


def compute(folder, precision="32"):
    found = {case: facts_of(case, folder, precision=precision) for case in CASES}
    found["greedy"] = drawn(folder, True, precision=precision)
    found["drawn"] = drawn(folder, False, precision=precision)
    found["drawn, top-k, top-p"] = drawn(folder, False, precision=precision, sampling_params=KEPT)
    return found


def on_host(tree):
    return {k: on_host(v) if isinstance(v, dict) else v.cpu() for k, v in tree.items()}


def main():
    mode, results, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if mode == "reference":
        torch.set_num_threads(1)
        assert not accelerator.has_gpu()  # ALIGNER_FORCE_CPU=1
        torch.save(on_host(compute(folder)), results)
        return
    from aligner_plan.dry.device import DryDevice

    with DryDevice():
        found = [*compute(folder, "32").values(), *compute(folder, "bf16").values()]
        devices = {str(facts.get("scores", facts.get("tokens")).device) for facts in found}
    results.write_text(f"{len(found)} cases on {' and '.join(sorted(devices))}\n")


if __name__ == "__main__":
    main()
