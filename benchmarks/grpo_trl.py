"""TRL's side of `grpo_step`: its GRPOTrainer on transformers' Llama, in an environment of its own.

No reference and one epoch, as TRL's own defaults have it; every pass takes ``--micro-batch`` rows.
TRL's gradient checkpointing is off: that is its faster setting. A step is the time from one
`on_step_end` to the next: generation, scoring where TRL does it, the update, TRL's own logging.
"""

import json
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import stdout_reserved
from benchmarks.ppo_shape import (
    INIT_STD,
    LEARNING_RATE,
    RATIO_CLIP,
    SEED,
    Shape,
    StepClock,
    shape_of,
)


def measure(shape: Shape) -> dict[str, Any]:
    """One step to warm up, then ``shape.steps`` of them."""
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


class StepWatch(TrainerCallback):
    """Reads the clock around every step."""

    def __init__(self) -> None:
        self.clock = StepClock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.tick()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.tick()


def make_trainer(shape: Shape, folder: str, reward: Any, watch: StepWatch) -> GRPOTrainer:
    """TRL's trainer with its defaults, and the settings of both sides."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=shape.prompt + shape.response,
        initializer_range=INIT_STD,
        tie_word_embeddings=bool(shape.tied),
        bos_token_id=None,
        eos_token_id=shape.vocab - 1,
        pad_token_id=shape.vocab - 1,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    count = shape.batch // shape.group * (shape.steps + 1)
    ids = torch.randint(0, shape.vocab - 1, (count, shape.prompt)).tolist()
    prompts = [" ".join(f"w{number}" for number in row) for row in ids]
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=grpo_config(shape, folder),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=word_tokenizer(shape.vocab),
        callbacks=[watch],
    )


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the other side: words w0, w1, …, and ``</s>``, which ends and pads."""
    words = {f"w{number}": number for number in range(vocab - 1)}
    backend = RustTokenizer(WordLevel({**words, "</s>": vocab - 1}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="</s>", padding_side="left"
    )


def grpo_config(shape: Shape, folder: str) -> GRPOConfig:
    """Float32 on CPU; no recomputation of activations, which would only cost time here."""
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
