"""A critic that trains on the pass of its values learns the same in any layout.

Against one process that takes eight passes for an update and keeps none.
"""

import pytest
from role_checks import SMALL, assert_same, one_and_two

ONE = "1,1,1,none"
KEPT = ["1,1,1,none,whole", "2,1,1,none,whole", "2,1,1,full,whole"]
NOT_KEPT = "1,2,1,none,whole"  # pipeline stages have a graph each


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return one_and_two(tmp_path_factory.mktemp("kept"), SMALL, ONE, [*KEPT, NOT_KEPT])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [*KEPT, NOT_KEPT])
def test_numbers_are_those_of_one_process(layout, seen):
    model, one, many = seen
    files = (f"{model}.1.{ONE}.critic.nemo", f"{model}.2.{layout}.critic.nemo")
    assert_same(one["critic"], many[layout]["critic"], files)


@pytest.mark.timeout(600)
def test_the_first_update_makes_no_pass(seen):
    many = seen[2]
    assert {layout: many[layout]["critic"]["passes"] for layout in many} == {
        **dict.fromkeys(KEPT, 1),
        NOT_KEPT: 2,
    }
