"""The scripts as a launcher starts them: two processes write the metrics of one.

PPO's layouts are compared number by number in `test_layouts`. Here the other algorithms pass
through the same machinery, and the launcher says how many processes there are. Of own code a loss
is asked on the last pipeline stage alone, an estimator on every rank, and callbacks on one process,
whose stop or error ends both.
"""

import json
import re

import pytest
from ranks import run_ranks
from recipes import ROOT, near, numbers, settings

EXAMPLES = ROOT / "examples"
TENSOR_PACKED = [
    *("model.tensor_model_parallel_size=2", "model.sequence_packing.enabled=true"),
    "model.sequence_packing.train_mb_tokens=256",
]
DATA = ["model.micro_batch_size=8"]
# Eight prompts, three answers each: what is drawn again is seldom a multiple of two rows.
DYNAMIC = [
    *("trainer.ppo.max_steps=2", "trainer.ppo.dynamic_sampling.enabled=true"),
    *("model.ppo.num_rollouts_per_prompt=3", "model.ppo.num_rollout_samples=24"),
    *("model.global_batch_size=24", "model.micro_batch_size=4"),
    "reward.kwargs.pattern='[A-Za-z0-9].*'",
]


def start(folder, nemo, script, recipe, processes, *options):
    """Run a recipe to its end on so many processes, and return what each said."""
    arguments = [*("--config-name", f"recipes/{recipe}"), *settings(folder, nemo), *options]
    return run_ranks(EXAMPLES / script, processes, arguments, timeout_s=200)


def metrics(folder, nemo, script, recipe, processes, layout=()):
    start(folder, nemo, script, recipe, processes, "exp_manager.save_nemo=false", *layout)
    return numbers(folder)


def compare(one, two):
    assert len(one) > 1
    for line, other in zip(one, two, strict=True):
        assert other == near(line, rel=1e-4, abs=1e-5)


def extended(*values):
    return pytest.param(*values, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    ("script", "recipe", "steps", "layout"),
    [
        ("train_gpt_ppo.py", "ppo_tiny_cpu", "trainer.ppo.max_steps=1", TENSOR_PACKED),
        ("train_gpt_reinforce.py", "grpo_tiny_cpu", "trainer.ppo.max_steps=2", DATA),
        extended("train_gpt_rs.py", "rs_tiny_cpu", "trainer.rs.max_steps=2", TENSOR_PACKED),
        extended("train_gpt_sft.py", "sft_tiny_cpu", "trainer.sft.max_steps=3", TENSOR_PACKED),
        extended("train_gpt_sft.py", "sft_tiny_cpu", "trainer.sft.max_steps=3", DATA),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("cpu") else None,
)
def test_two_processes_write_the_metrics_of_one(tmp_path, tiny_nemo, script, recipe, steps, layout):
    one = metrics(tmp_path / "one", tiny_nemo, script, recipe, 1, [steps])
    two = metrics(tmp_path / "two", tiny_nemo, script, recipe, 2, [steps, *layout])
    compare(one, two)


@pytest.mark.extended
def test_groups_drawn_again_need_not_divide_among_the_ranks(tmp_path, tiny_nemo):
    script = ("train_gpt_reinforce.py", "grpo_tiny_cpu")
    one = metrics(tmp_path / "one", tiny_nemo, *script, 1, DYNAMIC)
    two = metrics(tmp_path / "two", tiny_nemo, *script, 2, DYNAMIC)
    again = [line["train_rollouts/samples_drawn"] - 24 for line in one[1:]]
    assert any(count % 2 for count in again), again
    compare(one, two)


def test_a_dry_run_of_two_processes_looks_at_both(tmp_path, tiny_nemo):
    options = ["dry_run=true", "model.tensor_model_parallel_size=2", "data.max_prompt_length=60"]
    script = ("train_gpt_ppo.py", "ppo_tiny_cpu")
    first, second = start(tmp_path / "run", tiny_nemo, *script, 2, *options)
    assert list(tmp_path.iterdir()) == []
    row = next(
        line.split() for line in first.splitlines() if line.split()[:2] == ["policy", "train"]
    )
    resident, rank = float(row[2]), int(row[-2])
    share = re.search(r"fullest in \w+, \w+: ([\d.]+) of", first)
    assert rank in (0, 1)
    assert float(share[1]) > 1.5 * resident  # both processes are on this machine
    assert "fullest in" not in second


EXTEND = EXAMPLES / "extend"
SCRIPT = ("train_gpt_reinforce.py", "grpo_tiny_cpu")
OWN = [
    f"model.ppo.loss={EXTEND}/my_loss.py:ClippedLoss",
    f"trainer.ppo.advantage.estimator={EXTEND}/my_advantage.py:leave_one_out",
    *("trainer.ppo.max_steps=3", "trainer.ppo.val_check_interval=2", "trainer.ppo.save_interval=1"),
]
STOP = f"{{callback: {EXTEND}/my_callback.py:StopWhenGood, kwargs: {{at: 0.0, patience: 2}}}}"
JOURNAL = f"{EXTEND}/my_callback.py:Journal"


def test_own_code_on_two_stages(tmp_path, tiny_nemo):
    stages = ["model.pipeline_model_parallel_size=2", "model.micro_batch_size=8"]
    callbacks = f"trainer.callbacks=[{STOP},{JOURNAL}]"
    one = metrics(tmp_path / "one", tiny_nemo, *SCRIPT, 1, OWN)
    two = metrics(tmp_path / "two", tiny_nemo, *SCRIPT, 2, [*OWN, *stages, callbacks])
    assert one[1]["custom/outside_fraction"] >= 0
    compare(one[:3], two)  # stopped after step 2 of 3
    told = [json.loads(line) for line in (tmp_path / "two" / "journal.jsonl").open()]
    assert [(line["event"], line["step"]) for line in told if line["event"] != "save"] == [
        *(("run_start", 0), ("validation_end", 0), ("step_end", 1)),
        *(("step_end", 2), ("validation_end", 2), ("run_end", 2)),
    ]
    assert [line["step"] for line in told if line["event"] == "save"] == [1, 2]


def test_an_error_in_a_callback_ends_both(tmp_path, tiny_nemo):
    (tmp_path / "bad.py").write_text(
        "from aligner.algorithms.callbacks import Callback\n"
        "class Bad(Callback):\n"
        "    def on_save(self, run, step, path):\n"
        "        raise OSError('no room for a copy')\n"
    )
    bad = f"trainer.callbacks=[{tmp_path}/bad.py:Bad]"
    with pytest.raises(AssertionError) as caught:
        start(tmp_path / "run", tiny_nemo, *SCRIPT, 2, bad, *OWN)
    said = str(caught.value)
    for rank in (0, 1):
        _, _, of_rank = said.partition(f"--- rank {rank}, exit code 2")
        assert "CallbackError: trainer.callbacks[0]=" in of_rank.partition("--- rank")[0]
    assert "on_save raised OSError: no room for a copy" in said
