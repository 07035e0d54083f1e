"""`trainer.deterministic`, tensor parallelism, dropout: a resumed run is the same to the bit.

Dropout of what every tensor-parallel rank has is drawn from torch's generator, that of what each
has a part of from megatron-core's; both go on where they were.
"""

from pathlib import Path

import pytest
from ranks import run_ranks
from run_state_worker import write_models


@pytest.mark.timeout(300)
def test_two_tensor_ranks_go_on_where_they_were(tmp_path):
    write_models(tmp_path)
    run_ranks(Path(__file__).with_name("deterministic_rank.py"), 2, [tmp_path], timeout_s=280)
