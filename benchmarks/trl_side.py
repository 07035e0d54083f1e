"""What `ppo_trl` and `grpo_trl` have in common. In an environment that has transformers."""

from typing import Any

from transformers import LlamaConfig, TrainerCallback

from benchmarks.ppo_shape import INIT_STD, Shape, StepClock


class StepWatch(TrainerCallback):
    """Reads the clock around every step."""

    def __init__(self) -> None:
        self.clock = StepClock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.tick()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.tick()


def llama_config(shape: Shape, **overrides: Any) -> LlamaConfig:
    """Return the Llama of ``shape``."""
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=shape.prompt + shape.response,
        initializer_range=INIT_STD,
        tie_word_embeddings=bool(shape.tied),
        **overrides,
    )
