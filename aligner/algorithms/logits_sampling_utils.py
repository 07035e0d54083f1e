"""NeMo-RL's place of `TrainingSamplingParams`."""

from aligner.logprobs.top_k_top_p import TrainingSamplingParams

__all__ = ["TrainingSamplingParams"]
