"""NeMo-RL's place of `TrainingSamplingParams`."""

from aligner.distributed.sampling_params import TrainingSamplingParams

__all__ = ["TrainingSamplingParams"]
