"""TRL's side of `ppo_step`: its PPOTrainer on transformers' Llama, in a separate environment.

TRL needs four models: policy, reference (a second Llama), value (Llama with a score head) and
reward. The reward here is a module that returns ones at once. A step is the time from one
`on_step_end` to the next: generation, scoring, one epoch of training, TRL's own logging. No step
saves, reports or samples completions. The end-of-sequence token is unset and the padding id lies
outside the vocabulary, so every response is complete and no token of it is masked.
"""

import json
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.common import stdout_reserved
from benchmarks.ppo_shape import (
    GAMMA,
    KL_COEFFICIENT,
    LAM,
    LEARNING_RATE,
    RATIO_CLIP,
    SEED,
    VALUE_CLIP,
    Shape,
    shape_of,
)
from benchmarks.trl_side import StepWatch, llama_config


def measure(shape: Shape) -> dict[str, Any]:
    """Run one step to warm up, then ``shape.steps`` steps."""
    torch.set_num_threads(shape.threads)
    watch = StepWatch()
    reward = ConstantReward(shape.prompt)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(shape, folder, reward, watch).train()
    assert reward.tokens_seen == {shape.batch * shape.response}, reward.tokens_seen
    return watch.clock.report("trl", shape)


class ConstantReward(nn.Module):
    """The smallest thing that TRL takes for a reward model: 1 for every sequence."""

    base_model_prefix = "backbone"

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self.score = nn.Identity()
        self.tokens_seen: set[int] = set()  # unmasked response tokens, of every rollout
        self._prompt = prompt

    def backbone(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """Return ones [B, S, 1] in place of hidden states."""
        self.tokens_seen.add(int(attention_mask[:, self._prompt :].sum()))
        return SimpleNamespace(hidden_states=[torch.ones(*input_ids.shape, 1)])


def make_trainer(shape: Shape, folder: str, reward: nn.Module, watch: StepWatch) -> PPOTrainer:
    """Build TRL's trainer with its defaults and the settings of both sides."""
    config = llama_config(
        shape, num_labels=1, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(SEED)
    policy, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    reference.load_state_dict(policy.state_dict())
    prompts = torch.randint(0, shape.vocab - 1, (shape.batch * (shape.steps + 1), shape.prompt))
    return PPOTrainer(
        args=ppo_config(shape, folder),
        processing_class=SimpleNamespace(pad_token_id=shape.vocab, eos_token_id=shape.vocab),
        model=policy,
        ref_model=reference.eval(),
        reward_model=reward,
        value_model=LlamaForSequenceClassification(config),
        train_dataset=[{"input_ids": row} for row in prompts],
        eval_dataset=[{"input_ids": prompts[0]}],  # its loader is made, and never read
        data_collator=lambda rows: {"input_ids": torch.stack([row["input_ids"] for row in rows])},
        callbacks=[watch],
    )


def ppo_config(shape: Shape, folder: str) -> PPOConfig:
    """Return a float32 CPU configuration without recomputation of activations."""
    return PPOConfig(
        output_dir=folder,
        bf16=False,
        use_cpu=True,
        seed=SEED,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        total_episodes=shape.batch * (shape.steps + 1),
        per_device_train_batch_size=shape.micro_batch,
        gradient_accumulation_steps=shape.batch // shape.micro_batch,
        local_rollout_forward_batch_size=shape.batch,
        num_mini_batches=1,
        num_ppo_epochs=1,
        num_sample_generations=0,
        response_length=shape.response,
        temperature=1.0,
        kl_coef=KL_COEFFICIENT,
        cliprange=RATIO_CLIP,
        cliprange_value=VALUE_CLIP,
        gamma=GAMMA,
        lam=LAM,
    )


if __name__ == "__main__":
    with stdout_reserved():
        result = measure(shape_of())
    print(json.dumps(result))
