"""Every function of `model_utils` on gloo ranks equals the whole vocabulary in float64.

Tensor parallel 4, and tensor parallel 2 with context parallel 2; float64, float32 and bfloat16.
"""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("model_utils_worker.py")
LAYOUTS = {"tp4": "4,1", "tp2cp2": "2,2"}
CASES = [
    *("softmaxes", "logprobs", "padded_columns", "sampling", "gathers", "entropies"),
    *("cross_entropies", "exchanges", "topk", "fused", "frames", "packed", "hidden_frames"),
    *("context", "chosen_logits", "distillation", "dtensors"),
]


@pytest.fixture(scope="module", params=["tp2cp2", pytest.param("tp4", marks=pytest.mark.extended)])
def outcome(request, tmp_path_factory):
    """One launch for all cases of a layout."""
    output = tmp_path_factory.mktemp("model_utils") / "outcome.json"
    layout = LAYOUTS[request.param]
    run_ranks(WORKER, 4, [output, layout], timeout_s=280)
    return json.loads(output.read_text())[layout]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole_vocabulary(case, outcome):
    failure = outcome[case]
    assert failure is None, failure
