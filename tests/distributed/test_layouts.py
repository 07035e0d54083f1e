"""Every layout gives one process's numbers, whether micro-batches are padded, dynamic or
packed, and whether what sequences begin with in common goes through the model once: conversations,
forked ones and recorded sets of what a filter kept among them.

Scores, what training reports, every parameter's gradient, and the weights after two updates, of
actor and critic. Float32 rounding differs with the order of sums: the largest difference stays
within 1e-5 of the largest value of a tensor, or of a reported number (or of 1e-2 where that is
more: such a number is what terms of order 1 leave when they cancel).
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from role_checks import assert_near

WORKER = Path(__file__).with_name("layout_worker.py")
MODES = ("padded", "dynamic", "packed", "shared")
REFERENCES = {"masked": "masked", "shared": "separate"}  # of one process; of the others: padded
# tensor, pipeline, context, sequence parallel; the rest of the processes is data parallel
LAYOUTS = {
    1: {"one process": "1,1,1,0"},
    2: {
        "data 2": "1,1,1,0",
        "tensor 2": "2,1,1,0",
        "tensor 2 + sequence": "2,1,1,1",
        "pipe 2": "1,2,1,0",
        "context 2": "1,1,2,0",
    },
    4: {
        "tensor 2 x pipe 2": "2,2,1,0",
        "tensor 2 x data 2": "2,1,1,1",
        "context 2 x tensor 2": "2,1,2,1",
    },
}
# Where sequences begin alike and what top-p kept with each token was recorded, of the actor.
RECORDED = {
    1: ("one process",),
    2: ("data 2", "tensor 2 + sequence", "pipe 2", "context 2"),
    4: ("context 2 x tensor 2",),
}
SEPARATE = "1,1,1,0,recorded separate"
# Where rows hold several sequences, of actor and critic.
FORKED = {
    1: ("one process",),
    2: ("data 2", "tensor 2 + sequence", "pipe 2", "context 2"),
    4: ("context 2 x tensor 2",),
}
UNSHARED = "1,1,1,0,forked separate"
FURTHER = pytest.mark.extended  # four processes on a small machine take long
# Of "tensor 2 + sequence" and of `test_lora_layouts` too.
LESS_OFTEN = {("tensor 2", mode) for mode in MODES[1:]} | {("tensor 2 + sequence", "dynamic")}
CASES = [
    pytest.param(
        *(processes, name, mode),
        marks=FURTHER if processes == 4 or (name, mode) in LESS_OFTEN else (),
    )
    for processes, layouts in LAYOUTS.items()
    for name in layouts
    for mode in MODES
    if (processes, mode) != (1, "padded")
]


def launch(processes, is_further, model, output):
    layouts = [
        f"{sizes},{mode}"
        for name, sizes in LAYOUTS[processes].items()
        for mode in MODES
        if ((name, mode) in LESS_OFTEN) == is_further
    ]
    if is_further:
        return seen_by(processes, model, output, layouts)
    layouts += [f"{LAYOUTS[processes][name]},recorded" for name in RECORDED[processes]]
    layouts += [f"{LAYOUTS[processes][name]},forked" for name in FORKED[processes]]
    if processes == 1:
        layouts += ["1,1,1,0,separate", SEPARATE, UNSHARED]
    if processes < 4:
        layouts.append("1,1,1,0,masked")  # over two processes: one has no valid token
    return seen_by(processes, model, output, layouts)


def seen_by(processes, model, output, layouts):
    run_ranks(WORKER, processes, [model, output, *layouts], timeout_s=600)
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    launched = cache(
        lambda processes, is_further: launch(
            processes, is_further, tiny_nemo, folder / f"{processes}{is_further}.pt"
        )
    )
    return lambda processes, is_further=False: launched(processes, is_further)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("processes", "name", "mode"), [*CASES, (2, "data 2", "masked")])
def test_a_layout_equals_one_process(processes, name, mode, role, seen):
    one = seen(1)[f"1,1,1,0,{REFERENCES.get(mode, 'padded')}"][role]
    other = seen(processes, (name, mode) in LESS_OFTEN)
    assert_same(one, other[f"{LAYOUTS[processes][name]},{mode}"][role])


@pytest.mark.parametrize(
    ("processes", "name"),
    [
        pytest.param(processes, name, marks=FURTHER if processes == 4 else ())
        for processes, names in RECORDED.items()
        for name in names
    ],
)
def test_what_a_filter_kept_stays_with_its_token(processes, name, seen):
    one = seen(1)[SEPARATE]["actor"]
    unfiltered = seen(1)["1,1,1,0,separate"]["actor"]
    # Of six tokens or fewer a token has more than of all.
    assert (one["before"] - unfiltered["before"]).max() > 2
    assert_same(one, seen(processes)[f"{LAYOUTS[processes][name]},recorded"]["actor"])


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("processes", "name"),
    [
        pytest.param(processes, name, marks=FURTHER if processes == 4 else ())
        for processes, names in FORKED.items()
        for name in names
    ],
)
def test_rows_of_several_sequences(processes, name, role, seen):
    """Held to one process that shares nothing; what that computes is held to rows of one sequence
    in unit/test_forked_rows.py.
    """
    layout = f"{LAYOUTS[processes][name]},forked"
    assert_same(seen(1)[UNSHARED][role], seen(processes)[layout][role])


def assert_same(one, other):
    assert (one["after"] - one["before"]).abs().max() > 1e-4  # there was something to compare
    assert_near(one, other)
