"""A preference run that SIGKILL stops ends with the numbers and weights of one left alone."""

from test_resume import finished, kill, result, wait_for

from aligner.observe.metrics import read_metrics

# With a reference that was asked and a baseline of the policy.
ARGUMENTS = [
    *("--config-name", "recipes/kto_tiny_cpu"),
    "trainer.dpo.max_steps=6",
    "trainer.dpo.save_interval=2",
    "trainer.dpo.val_check_interval=3",
    "data.train.arguments.size=192",
    "data.validation.arguments.size=16",
]


def test_killed_and_continued(tmp_path, start_run):
    def start(folder):
        return start_run("train_gpt_dpo", folder, *ARGUMENTS)

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finished(start(alone), alone)
    process = start(killed)
    # Step 3 is made, and the state of step 2, which is written beside it, is whole.
    wait_for(lambda: len(read_metrics(killed / "metrics.jsonl")) > 3, process)
    wait_for(lambda: any((killed / "run_state").glob("step_*")), process)
    kill(process)
    asked = (killed / "reference_logprobs.pt").stat().st_mtime_ns
    finished(start(killed), killed)
    assert (killed / "reference_logprobs.pt").stat().st_mtime_ns == asked  # not asked again
    assert result(killed) == result(alone)
