"""Runs of the tiny model that learn nothing say so, and leave no model that is none."""

import pytest
import recipes
import torch
from newest_state import newest

from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.errors import NonFiniteError
from aligner.observe.metrics import read_metrics

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path, tiny_nemo, capsys):
    """``run(algorithm, *overrides)`` runs a tiny recipe in ``tmp_path``; what it printed."""

    def start(algorithm, *overrides):
        capsys.readouterr()
        recipes.run(tmp_path, tiny_nemo, f"{algorithm}_tiny_cpu", *overrides)
        return " ".join(capsys.readouterr().out.split())

    return start


def with_nan(nemo, folder, part, row):
    """The model with NaN in the first weight whose name contains ``part``."""
    path = folder / "nan.nemo"
    with open_nemo(nemo) as model:
        weights = {each: model.weights[each].clone() for each in model.weights}
        name = next(name for name in weights if part in name)
        weights[name][row, 0] = torch.nan
        save_nemo(path, weights, model.architecture, model.tokenizer.files())
    return f"model.restore_from_path={path}"


def test_sft_of_a_model_with_a_nan_ends_after_the_stated_number_of_steps(
    run, tmp_path, tiny_nemo, capsys
):
    sick = with_nan(tiny_nemo, tmp_path, "mlp.linear_fc2.weight", 1)
    with pytest.raises(NonFiniteError, match=r"steps 1 to 3: no update of the model"):
        run("sft", sick, "trainer.sft.max_steps=20", "trainer.sft.max_skipped_steps=3")
    assert "step 1: no update of the model" in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert not (tmp_path / "policy.nemo").exists()


def test_a_model_with_a_nan_that_nobody_reads_is_not_written(run, tmp_path, tiny_nemo):
    sick = with_nan(tiny_nemo, tmp_path, "embedding", 3)  # a byte that no example has
    with pytest.raises(NonFiniteError, match=r"policy\.nemo was not written"):
        run("sft", sick, "trainer.sft.max_steps=2")
    assert not (tmp_path / "policy.nemo").exists()
    assert (tmp_path / "report.html").exists()
    assert newest(RunStateStore(tmp_path / "run_state"))


def test_ppo_whose_rewards_overflow_ends(run, tmp_path):
    short = ["trainer.ppo.max_steps=1", "data.validation=null", "trainer.ppo.reward.scale=3e38"]
    with pytest.raises(NonFiniteError, match=r"no update of the .*Check the rewards"):
        run("ppo", *short)
    assert not (tmp_path / "policy.nemo").exists()


def test_a_short_run_says_why_and_a_finished_one_that_nothing_is_left(run, tmp_path):
    said = run("sft", "trainer.sft.max_steps=9", "data.train.arguments.size=64")
    assert "Fine-tuning on 1 process" in said
    why = "after 2 of trainer.sft.max_steps=9 steps, because trainer.sft.max_epochs=1 limits it"
    assert f"the run ends {why}" in said
    assert why in " ".join((tmp_path / "report.html").read_text().split())
    assert "step 1/2 loss 5." in said
    assert "step 2/2 loss 5." in said
    assert " samples " not in said  # there are none
    said = run("sft", "trainer.sft.max_steps=1", "data.train.arguments.size=64")
    assert "no step remains: 2 steps are finished, and 1 are configured" in said
