"""Defects that this library's ancestor was known for, and that cannot happen here.

Tests of masks padded with EOS, of micro-batches of padding, of ranks that share samples, of losses
that need micro-batches of 1, and of errors of workers are with their subjects.
"""

import pytest
import recipes
import torch

from aligner.algorithms.rollout.rollout import prompts_batch
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.data.batches import Prompt, collate_prompts
from aligner.errors import DamagedStateError
from aligner.observe.metrics import MetricsWriter, read_metrics

PAST_FLOAT32 = 2**24 + 1  # float32 makes 2**24 of it


def test_every_section_is_read_by_its_own_role(tiny_nemo, tmp_path):
    lines = recipes.run(
        *(tmp_path, tiny_nemo, "ppo_tiny_cpu", "exp_manager.save_nemo=false"),
        *("data.validation=null", "trainer.ppo.max_steps=3", "model.ppo.num_rollout_samples=8"),
        *("model.global_batch_size=8", "model.micro_batch_size=4", "model.optim.lr=1e-3"),
        *("critic.global_batch_size=4", "critic.micro_batch_size=2", "critic.optim.lr=2e-3"),
    )
    last = lines[-1]
    assert (last["train_optim/lr"], last["critic/lr"]) == (1e-3, 2e-3)
    assert (last["train_optim/optimizer_steps"], last["critic/optimizer_steps"]) == (3, 6)


# Trainer state in file names, counters through float32 ----------------------------------------


def test_no_state_of_the_trainer_is_in_a_file_name(tmp_path):
    store = RunStateStore(tmp_path)
    path = store.save(3, {"learner": {"consumed_samples": PAST_FLOAT32}})
    assert path.name == "step_000003"
    renamed = path.rename(path.with_name("step_000777"))
    with pytest.raises(DamagedStateError, match="has the step 3"):  # a name cannot tell another one
        store.load(renamed)
    loaded = store.load(renamed.rename(path.with_name("copy")))
    assert (loaded.step, loaded.state["learner"]["consumed_samples"]) == (3, PAST_FLOAT32)


def test_counters_are_whole_numbers_of_any_size(tmp_path):
    metrics = MetricsWriter(tmp_path)
    metrics.write(1, {"progress/consumed_samples": PAST_FLOAT32})
    metrics.close()
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert line["progress/consumed_samples"] == PAST_FLOAT32
    prompts = collate_prompts([Prompt(0, "p", [1], None, {})] * 2, pad_id=0)
    data = prompts_batch(prompts, first_sample_id=PAST_FLOAT32 - 1)
    assert torch.equal(data["sample_ids"], torch.tensor([PAST_FLOAT32 - 1, PAST_FLOAT32]))
