"""A rollout engine from outside of the library: a run samples with it, and its rules are checked.

Without it the library names no other engine than those of the table `ENGINES`.
"""

import math
import re
import subprocess
import sys

import pytest
import recipes
from recipes import ROOT

from aligner.catalog import ENGINES, imported
from aligner.config import EngineConfig, load_config
from aligner.errors import ConfigError
from aligner.importing import load_function

pytestmark = pytest.mark.integration

FILE = f"{ROOT}/examples/extend/my_engine.py"
ENGINE = f"generation.backend={FILE}:FixedAnswers"
SMALL = [
    *("model.ppo.num_rollout_samples=4", "model.ppo.num_rollouts_per_prompt=2"),
    *("model.global_batch_size=4", "model.micro_batch_size=2", "trainer.ppo.max_steps=2"),
    "data.train.arguments.size=8",
]


def test_grpo_learns_from_an_engine_of_a_users(tiny_nemo, tmp_path, monkeypatch):
    engine = load_function(f"{FILE}:FixedGeneration", key="")
    fetched, prepare = [], engine.prepare_for_generation

    def prepared(self, *args):
        prepare(self, *args)
        fetched.append({name: weight.clone() for name, weight in self.weights.items()})

    monkeypatch.setattr(engine, "prepare_for_generation", prepared)
    options = [*SMALL, ENGINE, "+generation.kwargs={answer: [50, 51], probability: 0.25}"]
    metrics = recipes.run(tmp_path, tiny_nemo, "grpo_tiny_cpu", *options)[-1]
    assert metrics["train_rollouts/generation_length"] == 2
    # The policy gives each of 260 tokens a probability near 1/260, the engine states 1/4.
    assert metrics["sampler/logprob_gap_mean"] > math.log(260 / 4) / 2
    assert fetched[0].keys() == fetched[-1].keys() != set()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ENGINE, "+generation.kwargs={answer: []}"], r"generation.kwargs.answer: 0 tok.* Give 1"),
        ([ENGINE, "+generation.kwargs={answers: []}"], r"generation.kwargs.answers: unknown key"),
        ([f"{ENGINE}s"], r"generation.backend=.*has no class 'FixedAnswerss'"),
        (
            [f"generation.backend={FILE}:FixedGeneration"],
            r"generation.backend=.*must be a subclass of aligner.config.EngineConfig",
        ),
        (["+generation.kwargs={answer: []}"], r"generation.kwargs.*needs a user-defined engine"),
        (
            [ENGINE, "generation.async_rollouts=true"],
            r"async_rollouts=true needs an engine that samples while.*Set generation.backend=vllm",
        ),
        (
            [ENGINE, "model.ppo.record_kept_tokens=2", "model.ppo.sampling_params.top_k=2"],
            r"record_kept_tokens=2 with generation.backend=.*the engine does not record",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(recipes.composed("grpo_tiny_cpu", *SMALL, *overrides))


def test_each_engine_of_the_library_is_named_in_its_own_folder_only():
    """Documents and texts for readers aside: no other code names an engine."""
    for name, path in ENGINES.items():
        assert issubclass(imported(path), EngineConfig)
        uses = re.compile(rf"generation\.{name}\b(?!\.\*)|[\"']{name}[\"']|\b{name}\.\w+\(")
        found = {
            str(file.relative_to(ROOT))
            for library in ("aligner", "aligner_environments", "aligner_plan")
            for file in (ROOT / library).rglob("*.py")
            if f"generation/{name}/" not in str(file) and uses.search(file.read_text())
        }
        # The table, the packages that may be installed, keys of other libraries.
        names = ("catalog", "packages", "compat/nemo_aligner", "config/translation/nemo_rl_values")
        assert found <= {f"aligner/{name}.py" for name in names}


@pytest.mark.usefixtures("dry_possible")
def test_an_engine_without_resources_is_not_planned(tiny_nemo):
    """Its file, which the configuration imports, imports torch before the dry device is there."""
    plan = [sys.executable, ROOT / "examples" / "plan.py", "--config-name", "recipes/grpo_tiny_cpu"]
    settings = [ENGINE, "generation.kwargs.answer=[50]", f"model.restore_from_path={tiny_nemo}"]
    done = subprocess.run([*plan, *settings], capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "FixedAnswers: this engine does not state its resources" in done.stderr
    assert "EngineConfig.resources" in done.stderr
