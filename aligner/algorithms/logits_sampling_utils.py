"""NeMo-RL's place of `TrainingSamplingParams`."""

from aligner.logprobs.sampling_params import TrainingSamplingParams

__all__ = ["TrainingSamplingParams"]
