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
# Families that compute in a way of their own, and others.
OWN = ("starcoder2", "phi4_mini", "smollm3_biases", "olmo2", "granite", "gemma3", "qwen2_moe")
OTHERS = (
    *("nemotron", "stablelm_biases", "seed_oss", "arcee", "glm", "ernie4_5_biases", "helium"),
    *("glm4", "olmo3_yarn", "gemma"),
)
# Name of a run: "tensor,pipeline", and the families.
RUNS = {
    "tensor 2": ("2,1", OWN),
    "tensor 2, others": ("2,1", OTHERS),
    "pipe 2": ("1,2", (*OWN, *OTHERS)),
}
CELLS = [
    pytest.param(run, family, marks=() if run == "tensor 2" else pytest.mark.extended)
    for run, (_, families) in RUNS.items()
    for family in families
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")

    def trained(layout, families, output, train):
        models = {family: folder / family for family in families}
        for family, path in models.items():
            if not path.exists():
                save_random_model(*CASES[family], path)
        found = train(layout, [str(path) for path in models.values()], str(output))
        return {
            family: (found[str(path)], Path(f"{output}.{number}.nemo"))
            for number, (family, path) in enumerate(models.items())
        }

    def launched(layout, models, output):
        run_ranks(WORKER, 2, [output, layout, *models], timeout_s=480)
        return torch.load(output, weights_only=True)

    @cache
    def one(family):
        return trained("1,1", [family], folder / f"{family}.pt", train_all)[family]

    @cache
    def of(run):
        return trained(*RUNS[run], folder / f"{run}.pt", launched)

    return lambda run, family: (one(family), of(run)[family])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("run", "family"), CELLS)
def test_a_layout_equals_one_process(run, family, seen):
    (single, file), (spread, other_file) = seen(run, family)
    assert_same(single, spread, (file, other_file))
