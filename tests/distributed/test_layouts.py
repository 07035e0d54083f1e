"""Every layout gives one process's numbers, whether micro-batches are padded, dynamic or
packed, and whether what sequences begin with in common goes through the model once: conversations,
forked ones and recorded sets of what a filter kept among them. So do adapters, with dropout too.

Scores, what training reports, the gradient of what is trained, and the weights after two updates,
of actor and critic. Float32 rounding differs with the order of sums: the largest difference stays
within 1e-5 of the largest value of a tensor, or of a reported number (or of 1e-2 where that is
more: such a number is what terms of order 1 leave when they cancel).
"""

from functools import cache

import pytest
import torch
from layout_worker import ADAPTERS, LORA, learn_all
from ranks import on_ranks
from role_checks import assert_near, difference

from aligner.checkpoint.adapters import Adapters, adapter_shapes, save_adapters
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

# Mode: that of the one process whose numbers it gives. What unshared, forked rows compute is held
# to rows of one sequence in unit/models/test_forked_rows.py.
REFERENCES = {
    **dict.fromkeys(("padded", "dynamic", "packed"), "padded"),
    **{"masked": "masked", "shared": "separate"},
    **{"recorded": "recorded separate", "forked": "forked separate"},
    "lora packed": "lora padded",
    **dict.fromkeys(("lora dropout dynamic", "lora dropout packed"), "lora dropout padded"),
}
ONE = "1,1,1,0"
ALL = ("padded", "dynamic", "packed", "shared", "recorded", "forked")
LORA_MODE, DROPOUT = "lora packed", "lora dropout packed"
# Processes; tensor, pipeline, context, sequence parallel; modes. What is left is data parallel.
LAYOUTS = [
    (1, ONE, (*ALL[1:], LORA_MODE)),
    (2, ONE, (*ALL, "masked", DROPOUT)),  # one rank has no valid token
    (2, "2,1,1,0", ("padded", "lora dropout dynamic")),
    (2, "2,1,1,1", ("padded", *ALL[2:], LORA_MODE, DROPOUT)),
    (2, "1,2,1,0", (*ALL, LORA_MODE)),
    (2, "1,1,2,0", (*ALL, DROPOUT)),
    (4, "2,2,1,0", (*ALL[:4], LORA_MODE)),
    (4, "2,1,1,1", (*ALL[:4], DROPOUT)),
    (4, "2,1,2,1", (*ALL, LORA_MODE)),
]
CASES = [  # four processes on a small machine take long
    pytest.param(processes, sizes, mode, marks=pytest.mark.extended if processes == 4 else ())
    for processes, sizes, modes in LAYOUTS
    for mode in modes
]


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "tiny.nemo").symlink_to(tiny_nemo)
    generator = torch.Generator().manual_seed(4)
    # B is not zero, so that A has a gradient from the first update on.
    begin = {
        name: torch.randn(shape, generator=generator) / 8
        for name, shape in adapter_shapes(TINY_ARCHITECTURE, LORA).items()
    }
    save_adapters(folder / ADAPTERS, Adapters(LORA, begin))

    @cache
    def launched(processes):
        rows = [(sizes, modes) for number, sizes, modes in LAYOUTS if number == processes]
        if processes == 1:
            rows.append((ONE, {*REFERENCES.values()}))
        layouts = [f"{sizes},{mode}" for sizes, modes in rows for mode in modes]
        return on_ranks(processes, learn_all, str(folder / "tiny.nemo"), layouts, timeout_s=600)

    return launched


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processes", "sizes", "mode"), CASES)
def test_a_layout_equals_one_process(processes, sizes, mode, seen):
    for role, one in seen(1)[f"{ONE},{REFERENCES[mode]}"].items():
        assert (one["after"] - one["before"]).abs().max() > 1e-4  # there was something to compare
        assert_near(one, seen(processes)[f"{sizes},{mode}"][role], role)


def test_recorded_sets_change_what_a_token_has(seen):
    """Of six tokens or fewer a token has more than of all."""
    filtered, unfiltered = (
        seen(1)[f"{ONE},{mode}"]["actor"]["before"] for mode in ("recorded separate", "separate")
    )
    assert (filtered - unfiltered).max() > 2


def test_dropout_of_adapters_changes_what_is_learned_and_not_what_is_said(seen):
    kept, dropped = (seen(1)[f"{ONE},lora {mode}padded"] for mode in ("", "dropout "))
    assert torch.equal(kept["actor"]["reference"], kept["actor"]["before"])
    for role, one in kept.items():
        assert torch.equal(one["before"], dropped[role]["before"])
        for name, gradient in one["gradient"].items():
            if name.endswith(".lora.a"):
                assert difference(gradient, dropped[role]["gradient"][name]) > 0.05
