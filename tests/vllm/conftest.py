"""One Ray for all tests against vLLM, and the model that they share.

make test-vllm        makes the engines' environment and runs this folder
"""

import pytest
from vllm_roles import WIDE

from aligner.checkpoint.nemo import save_nemo
from aligner.checkpoint.tiny import random_weights
from aligner.data.byte_tokenizer import byte_level_tokenizer


@pytest.fixture(scope="session")
def wide_nemo(tmp_path_factory):
    """The tiny model with wider heads, its weights large enough for log-probs to differ."""
    path = tmp_path_factory.mktemp("models") / "wide.nemo"
    weights = random_weights(WIDE, seed=0, scale=0.2)
    save_nemo(path, weights, WIDE, byte_level_tokenizer().files())
    return path


@pytest.fixture(scope="session")
def ray():
    """Ray's processes, started once and gone at the end."""
    from aligner.distributed.ray_session import RayNeeds, ray_session

    with ray_session(None, RayNeeds(cpus=4, object_store_mb=128)):
        yield
