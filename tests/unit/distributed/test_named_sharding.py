"""Ranks by named coordinates."""

import numpy as np
import pytest

from aligner.distributed.named_sharding import NamedSharding, layout_of
from aligner.errors import LayoutError


def sharding():
    # pp, dp, tp = 2, 2, 2
    return NamedSharding(np.arange(8).reshape(2, 2, 2), ["pp", "dp", "tp"])


def test_ranks_by_their_coordinates():
    s = sharding()
    assert s.shape == {"pp": 2, "dp": 2, "tp": 2}
    assert s.get_axis_size("dp") == 2
    assert (s.ndim, s.size, s.names) == (3, 8, ["pp", "dp", "tp"])
    for rank in range(8):
        assert s.get_ranks(**s.get_worker_coords(rank)) == rank
    assert s.get_worker_coords(5) == {"pp": 1, "dp": 0, "tp": 1}
    s.layout[0, 0, 0] = 99
    assert s.get_ranks(pp=0, dp=0, tp=0) == 0
    assert sharding().get_ranks(dp=1) == NamedSharding([[2, 3], [6, 7]], ["pp", "tp"])
    assert sharding().get_ranks_by_coord(dp=1) == [2, 3, 6, 7]
    assert sharding().get_ranks_by_coord(pp=0, tp=1) == [1, 3]


@pytest.mark.parametrize(
    ("layout", "names", "words"),
    [
        ([[0, 1]], ["a"], r"2 axes.*got \['a'\]"),
        ([[0, 1]], ["a", "a"], "must differ"),
        ([0, 0], ["a"], "once"),
        ([0.5, 1.0], ["a"], "integer"),
    ],
)
def test_bad_layouts(layout, names, words):
    with pytest.raises(LayoutError, match=words):
        NamedSharding(layout, names)


def test_unknown_axes_and_megatrons_order():
    with pytest.raises(LayoutError, match="unknown axis 'cp'"):
        sharding().get_axis_size("cp")
    with pytest.raises(LayoutError, match=r"dp=2 is outside 0\.\.1"):
        sharding().get_ranks(dp=2)
    with pytest.raises(LayoutError, match="rank 8"):
        sharding().get_worker_coords(8)
    layout = layout_of(pipeline=2, data=2, context=1, tensor=2)
    assert layout.get_ranks_by_coord(pipeline_parallel=0, data_parallel=1) == [2, 3]
    assert layout.get_ranks_by_coord(pipeline_parallel=1, data_parallel=0) == [4, 5]
