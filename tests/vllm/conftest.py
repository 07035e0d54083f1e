"""One Ray for all tests against vLLM, and the model that they share.

make test-vllm        makes the engines' environment and runs this folder
"""

import sys
from pathlib import Path

import pytest

# Runs on Ray and what they could leave; agents.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("ray", "unit")]

from ray_fixtures import own_ray, ray  # noqa: F401
from vllm_roles import WIDE

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import random_weights


@pytest.fixture(scope="session")
def wide_nemo(tmp_path_factory):
    """The tiny model with wider heads, its weights large enough for log-probs to differ."""
    return write_wide(tmp_path_factory, scale=0.2)


@pytest.fixture(scope="session")
def fresh_nemo(tmp_path_factory):
    """The tiny model with wider heads, as fresh as that of the tiny recipe."""
    return write_wide(tmp_path_factory, scale=None)


def write_wide(tmp_path_factory, scale):
    path = tmp_path_factory.mktemp("models") / "wide.nemo"
    weights = random_weights(WIDE, seed=0, scale=scale)
    save_nemo(path, weights, WIDE, byte_level_tokenizer().files())
    return path
