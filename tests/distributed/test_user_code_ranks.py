"""Own code in runs of two processes, as a launcher starts them.

1. A loss is asked on the last pipeline stage alone, and an estimator on every rank: the metrics are
   those of one process.
2. Callbacks are called on one process, and a stop ends both.
3. An error in a callback, which one process alone has, ends both with its cause.
"""

import json

import pytest
from ranks import run_ranks
from recipes import ROOT, settings
from test_scripts import compare, metrics

EXTEND = ROOT / "examples" / "extend"
SCRIPT = ("train_gpt_reinforce.py", "grpo_tiny_cpu")
OWN = [
    f"model.ppo.loss={EXTEND}/my_loss.py:ClippedLoss",
    f"trainer.ppo.advantage.estimator={EXTEND}/my_advantage.py:leave_one_out",
    "trainer.ppo.max_steps=3",
    "trainer.ppo.val_check_interval=2",
    "trainer.ppo.save_interval=1",
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
        ("run_start", 0),
        ("validation_end", 0),
        ("step_end", 1),
        ("step_end", 2),
        ("validation_end", 2),
        ("run_end", 2),
    ]
    assert [line["step"] for line in told if line["event"] == "save"] == [1, 2]


def test_an_error_in_a_callback_ends_both(tmp_path, tiny_nemo):
    (tmp_path / "bad.py").write_text(
        "from aligner.algorithms.callbacks import Callback\n"
        "class Bad(Callback):\n"
        "    def on_save(self, run, step, path):\n"
        "        raise OSError('no room for a copy')\n"
    )
    arguments = [
        *("--config-name", f"recipes/{SCRIPT[1]}"),
        *settings(tmp_path / "run", tiny_nemo),
        f"trainer.callbacks=[{tmp_path}/bad.py:Bad]",
        *OWN,
    ]
    with pytest.raises(AssertionError) as caught:
        run_ranks(EXTEND.parent / SCRIPT[0], 2, arguments, timeout_s=200)
    said = str(caught.value)
    for rank in (0, 1):
        _, _, of_rank = said.partition(f"--- rank {rank}, exit code 2")
        assert "CallbackError: trainer.callbacks[0]=" in of_rank.partition("--- rank")[0]
    assert "on_save raised OSError: no room for a copy" in said
