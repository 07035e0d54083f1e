"""Every family over two processes gives one process's numbers, forward and after two updates.

Log-probs, responses drawn, loss, gradient norm, and the weights that the layout writes.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from family_worker import train_all
from hf_models import CASES, save_random_model
from ranks import run_ranks
from role_checks import assert_same

WORKER = Path(__file__).with_name("family_worker.py")
LAYOUTS = {"tensor 2": "2,1", "pipe 2": "1,2"}
# One case of every family that has a way of computing of its own.
FAMILIES = (
    *("nemotron", "starcoder2", "phi4_mini", "stablelm_biases", "seed_oss", "arcee"),
    *("smollm3_biases", "glm", "ernie4_5_biases", "helium", "glm4", "olmo2", "olmo3_yarn"),
    *("granite", "gemma", "gemma3", "qwen2_moe"),
)
CELLS = [
    pytest.param(layout, family, marks=() if layout == "tensor 2" else pytest.mark.extended)
    for layout in LAYOUTS
    for family in FAMILIES
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    models = {name: str(folder / name) for name in FAMILIES}
    for name, path in models.items():
        save_random_model(*CASES[name], Path(path))
    one = train_all("1,1", list(models.values()), str(folder / "one"))

    @cache
    def of(layout):
        output = folder / f"{layout}.pt"
        run_ranks(WORKER, 2, [output, LAYOUTS[layout], *models.values()], timeout_s=480)
        return torch.load(output, weights_only=True)

    def compared(layout, name):
        number = FAMILIES.index(name)
        files = (folder / f"one.{number}.nemo", folder / f"{layout}.pt.{number}.nemo")
        return one[models[name]], of(layout)[models[name]], files

    return compared


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "family"), CELLS)
def test_a_layout_equals_one_process(layout, family, seen):
    assert_same(*seen(layout, family))
