"""The examples of own code in examples/extend/ in whole runs of the tiny model.

1. A loss that says what the built-in one says leaves the same weights to the bit, with adapters,
   packed sequences and the DTensor backend as well; so does an estimator.
2. A loss of another kind learns, with an own estimator and dynamic sampling.
3. Callbacks are told of every trainer's run; a run that one stops goes on to what it would have
   been; a continued run says what is another.
4. A tokenizer is the run's, and in the model that it leaves.
5. What is refused is refused before a directory is made; a dry run calls no callback.
"""

import json

import pytest
from recipes import ROOT, numbers, run_steps, section_of, trained_hash
from variants import extended_except

from aligner.catalog import ALGORITHMS
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.errors import CallbackError, ConfigError

EXTEND = ROOT / "examples" / "extend"
LOSS = f"model.ppo.loss={EXTEND}/my_loss.py:"
ESTIMATOR = f"trainer.ppo.advantage.estimator={EXTEND}/my_advantage.py:"
JOURNAL = f"{EXTEND}/my_callback.py:Journal"
TRAINED = [entry.recipe for entry in ALGORITHMS.values() if entry.recipe != "grpo_tiny_cpu"]


def run(folder, nemo, recipe, steps, *overrides):
    """The metrics of each step; the hash of the weights."""
    run_steps(folder, nemo, recipe, steps, *overrides)
    return numbers(folder), trained_hash(folder)


PACKED = ["model.sequence_packing.enabled=true", "model.sequence_packing.train_mb_tokens=256"]


SMALL = ["trainer.ppo.val_check_interval=0", "model.global_batch_size=32"]
RLOO = "trainer.ppo.advantage.estimator=rloo"
# Recipe, options, own code and what it stands for.
SAME = {
    "loss, two passes": ("ppo", ["model.ppo.ratio_eps=[0.1,0.3]", "model.ppo.ppo_epochs=2"]),
    "loss, packed adapters": ("ppo", [*PACKED, "model.peft.peft_scheme=lora"]),
    "loss, dtensor": ("ppo", ["policy.backend=dtensor"]),
    "gae": ("ppo", ["trainer.ppo.initial_policy_kl_penalty=0.01"]),
    "leave_one_out": ("grpo", ["seed=3"]),
}


@pytest.mark.parametrize("case", SAME)
def test_own_code_that_says_the_same_leaves_the_same_weights(tmp_path, tiny_nemo, case):
    recipe, options = f"{SAME[case][0]}_tiny_cpu", SAME[case][1]
    is_loss = case.startswith("loss")
    own = f"{LOSS}ClippedLoss" if is_loss else f"{ESTIMATOR}{case}"
    options = [*options, *(SMALL if is_loss else ())]
    built_in = [RLOO] if recipe == "grpo_tiny_cpu" else []
    lines, weights = run(tmp_path / "built in", tiny_nemo, recipe, 2, *options, *built_in)
    own_lines, own_weights = run(tmp_path / "own", tiny_nemo, recipe, 2, *options, own)
    assert own_weights == weights
    if not is_loss:
        assert any(line.get("train_rollouts/advantages_std") for line in lines)
        assert own_lines == lines
        return
    for mine, line in zip(own_lines[1:], lines[1:], strict=True):
        assert 0 <= mine.pop("custom/outside_fraction") < 1
        assert mine == {name: line[name] for name in mine}
        assert {"train_optim/loss", "train_optim/ppo_ratio"} <= mine.keys()
        assert line.keys() - mine.keys() >= {"train_optim/entropy", "sampler/logprob_gap_max"}


def test_an_own_loss_with_an_own_estimator_learns(tmp_path, tiny_nemo):
    """The micro-batches are small, so that shares of the loss add up from many."""
    lines, _ = run(
        *(tmp_path, tiny_nemo, "grpo_tiny_cpu", 30),
        *(f"{LOSS}ReinforceLoss", "++model.ppo.loss_kwargs.weight=0.01"),
        *(f"{ESTIMATOR}leave_one_out", "++trainer.ppo.advantage.kwargs.scale=0.5"),
        "trainer.ppo.dynamic_sampling.enabled=true",
        "model.micro_batch_size=4",
    )
    assert lines[0]["val_rollouts/accuracy"] < 0.2
    assert lines[-1]["val_rollouts/accuracy"] > 0.9
    assert "train_rollouts/samples_drawn" in lines[1]
    assert "train_optim/ppo_ratio" not in lines[1]


def journal(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", extended_except(("ppo_tiny_cpu", "reward_tiny_cpu"), TRAINED))
def test_every_trainer_tells_its_callbacks(tmp_path, tiny_nemo, teacher, recipe):
    loop = section_of(recipe)
    options = [
        f"trainer.callbacks=[{JOURNAL}]",
        f"trainer.{loop}.save_interval=2",
        f"trainer.{loop}.val_check_interval=2",
        *([f"teacher.restore_from_path={teacher}"] if loop == "distill" else []),
    ]
    run(tmp_path, tiny_nemo, recipe, 2, *options)
    told = journal(tmp_path)
    assert [(line["event"], line["step"]) for line in told] == [
        *(("run_start", 0), ("validation_end", 0), ("step_end", 1), ("step_end", 2)),
        *(("validation_end", 2), ("save", 2), ("run_end", 2)),
    ]
    assert told[0]["of"] == 2
    assert told[5]["is_there"]
    assert told[6]["trained"] == [f"{'reward_model' if loop == 'reward_model' else 'policy'}.nemo"]
    assert any(name.startswith(("train_optim/", "critic/")) for name in told[2]["metrics"])
    assert all(name.startswith("val_") for name in told[1]["metrics"])


def test_a_continued_run_says_which_own_code_is_another(tmp_path, tiny_nemo, capsys):
    options = (tmp_path / "run", tiny_nemo, "grpo_tiny_cpu")
    run(*options, 1)
    changed = [f"{LOSS}ClippedLoss", f"trainer.callbacks=[{JOURNAL}]"]
    with pytest.raises(ConfigError, match=r"model\.ppo\.loss was None.*resume_changed"):
        run(*options, 2, *changed)
    lines, _ = run(*options, 2, *changed, "exp_manager.resume_changed=[model.ppo.loss]")
    assert "custom/outside_fraction" in lines[2]
    assert "custom/outside_fraction" not in lines[1]
    said = " ".join(capsys.readouterr().out.split())
    assert f"changed since the saved run: model.ppo.loss: None -> {EXTEND}/my_loss.py" in said
    assert f"changed since the saved run: trainer.callbacks: [] -> ['{JOURNAL}']" in said
    assert journal(tmp_path / "run")[0] == {"event": "run_start", "step": 1, "of": 2}
    own = f"{ESTIMATOR}leave_one_out"
    with pytest.raises(ConfigError, match=r"its algorithm is GRPO .*my_advantage\.py.*algorithm\]"):
        run(*options, 3, own)
    run(*options, 3, own, "exp_manager.accept_changed=[algorithm]")


def test_an_error_in_a_callback_ends_the_run_and_others_hear_of_it(tmp_path, tiny_nemo):
    (tmp_path / "bad.py").write_text(
        "from aligner.algorithms.callbacks import Callback\n"
        "class Bad(Callback):\n"
        "    def on_step_end(self, run, step, metrics):\n"
        "        raise OSError('no route to the dashboard')\n"
    )
    callbacks = f"trainer.callbacks=[{tmp_path}/bad.py:Bad,{JOURNAL}]"
    with pytest.raises(CallbackError, match=r"callbacks\[0\].*OSError: no route .*bad\.py, line 4"):
        run(tmp_path / "run", tiny_nemo, "ppo_tiny_cpu", 4, callbacks)
    last = journal(tmp_path / "run")[-1]
    assert (last["event"], last["step"]) == ("run_end", 1)
    assert last["reason"].startswith("CallbackError: trainer.callbacks[0]=")


def test_a_tokenizer_is_in_the_model_that_is_left(tmp_path, tiny_nemo):
    tokenizer = f"model.tokenizer={EXTEND}/my_tokenizer.py:by_line"
    run(tmp_path, tiny_nemo, "ppo_tiny_cpu", 1, tokenizer)
    with open_nemo(tmp_path / "policy.nemo") as trained, open_nemo(tiny_nemo) as start:
        assert trained.tokenizer.end_ids == (*start.tokenizer.end_ids, ord("\n"))


def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, tiny_nemo):
    with pytest.raises(ConfigError, match=r"trainer\.callbacks\[0\]="):
        run(tmp_path / "a", tiny_nemo, "sft_tiny_cpu", 1, "trainer.callbacks=[no_such:Thing]")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"model\.ppo\.loss="):
        run(tmp_path / "b", tiny_nemo, "ppo_tiny_cpu", 1, f"{LOSS}Missing")


def test_a_dry_run_makes_steps_with_own_code_and_calls_no_callback(tmp_path, tiny_nemo, capsys):
    options = [f"{LOSS}ClippedLoss", f"{ESTIMATOR}gae", f"trainer.callbacks=[{JOURNAL}]"]
    run_steps(tmp_path / "run", tiny_nemo, "ppo_tiny_cpu", 2, "dry_run=true", *options)
    assert not (tmp_path / "run").exists()
    assert "train" in capsys.readouterr().out
