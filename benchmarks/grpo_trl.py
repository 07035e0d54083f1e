"""TRL's side of `grpo_step`: its GRPOTrainer on transformers' Llama, in a separate environment.

No reference and one epoch, as TRL's own defaults have it. Every pass takes ``--micro-batch`` rows.
TRL's gradient checkpointing is off: that is its faster setting. A step is the time from one
`on_step_end` to the next: generation, scoring where TRL does it, the update, TRL's own logging.
"""

import json
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import stdout_reserved
from benchmarks.ppo_shape import LEARNING_RATE, RATIO_CLIP, SEED, Shape, shape_of
from benchmarks.trl_side import StepWatch, llama_config
from benchmarks.words import END, text_of, word_backend


def measure(shape: Shape) -> dict[str, Any]:
    """Run one step to warm up, then ``shape.steps`` steps."""
    torch.set_num_threads(shape.threads)
    watch = StepWatch()
    lengths: set[int] = set()

    def noise(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.update(len(ids) for ids in completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        make_trainer(shape, folder, noise, watch).train()
    assert lengths == {shape.response}, lengths
    return watch.clock.report("trl", shape)


def make_trainer(shape: Shape, folder: str, reward: Any, watch: StepWatch) -> GRPOTrainer:
    """Build TRL's trainer with its defaults and the settings of both sides."""
    end = shape.vocab - 1
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        llama_config(shape, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    )
    count = shape.batch // shape.group * (shape.steps + 1)
    ids = torch.randint(0, end, (count, shape.prompt)).tolist()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_backend(shape.vocab),
        eos_token=END,
        pad_token=END,
        padding_side="left",
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=grpo_config(shape, folder),
        train_dataset=Dataset.from_dict({"prompt": list(map(text_of, ids))}),
        processing_class=tokenizer,
        callbacks=[watch],
    )


def grpo_config(shape: Shape, folder: str) -> GRPOConfig:
    """Return a float32 CPU configuration without recomputation of activations."""
    return GRPOConfig(
        output_dir=folder,
        bf16=False,
        use_cpu=True,
        seed=SEED,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=shape.steps + 1,
        per_device_train_batch_size=shape.micro_batch,
        gradient_accumulation_steps=shape.batch // shape.micro_batch,
        num_generations=shape.group,
        max_completion_length=shape.response,
        generation_kwargs={"min_new_tokens": shape.response},
        temperature=1.0,
        beta=0.0,
        epsilon=RATIO_CLIP,
    )


if __name__ == "__main__":
    with stdout_reserved():
        result = measure(shape_of())
    print(json.dumps(result))
