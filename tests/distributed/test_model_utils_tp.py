"""Every function of `model_utils` on 2 and 4 gloo ranks equals the whole vocabulary in float64."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("model_utils_worker.py")
LAYOUTS = {"tp2": (2, 1), "tp4": (4, 1), "cp2": (1, 2), "tp2cp2": (2, 2)}
TENSOR = [
    *("softmaxes", "logprobs", "padded_columns", "sampling", "gathers", "entropies"),
    *("cross_entropies", "exchanges", "topk", "fused"),
]
BOTH = [
    *("frames", "packed", "hidden_frames", "context", "chosen_logits", "distillation", "dtensors")
]


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    tp, cp = LAYOUTS[request.param]
    output = tmp_path_factory.mktemp("model_utils") / "outcome.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(tp * cp), str(WORKER), str(output), str(tp), str(cp)),
        ],
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert output.exists(), done.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("outcome", "case"),
    [
        pytest.param(layout, case, id=f"{layout}-{case}")
        for layout, (_, cp) in LAYOUTS.items()
        for case in (BOTH if cp > 1 else TENSOR + BOTH)
    ],
    indirect=["outcome"],
    scope="module",
)
def test_equals_the_whole_vocabulary(outcome, case):
    assert outcome[case] is None, outcome[case]
