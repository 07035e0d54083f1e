"""`model.ppo.offload_weights`: a policy that is away while other roles work computes the same.

Memory is parked by a copy on the CPU, as it would be on a GPU: what is read while it is away fails.
"""

import pytest
import torch
from loaded import load_policy
from settings import parsed
from test_role_checkpoint import ROWS, assert_equal, make_batch

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.checkpoint.run_state.worker_state import seal
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt.role.settings import RunSettings

pytestmark = pytest.mark.integration

VARIANTS = {
    "float32, reference kept": {},
    "bf16, reference swapped": {"precision": "bf16", "model.reference.mode": "swap"},
    "bf16, gradients offloaded too": {"precision": "bf16", "model.ppo.offload_gradients": True},
    "adapters": {"model.peft.peft_scheme": "lora", "model.peft.lora_tuning.adapter_dim": 4},
    "dtensor": {"backend": "dtensor"},
}


class Run:
    """A policy in the phases of a step, and what it says in them."""

    def __init__(self, nemo, folder, parks, precision="32", backend="megatron", **changes):
        sizes = {"micro_batch_size": 2, "global_batch_size": ROWS}
        ppo = {"num_rollout_samples": ROWS, "length_params": {"max_length": 4}}
        optim = {"lr": 1e-3, "sched": {"name": "linear", "max_steps": 10}}
        given = {"restore_from_path": str(nemo), **sizes, "optim": optim, "ppo": ppo}
        changes["model.ppo.offload_weights"] = parks
        model = parsed({"model": given, "critic": sizes, **changes}).model
        run = RunSettings(precision=precision)
        self.handle = load_policy(model, init_reference_model=True, run=run, backend=backend)
        self.worker = self.handle.worker_group.worker
        self.folder, self.parks, self.saves = folder, parks, 0
        self.seen = []

    def check_away(self):
        """Nothing of it is on the device, where it is to be parked."""
        role = self.worker.model
        tensors = [*role.model.parameters(), *role.reference.parameters()]
        tensors += [p.main_grad for p in role.model.parameters() if hasattr(p, "main_grad")]
        if role.optimizer is not None and hasattr(role.optimizer, "inner"):
            tensors += [part.main for part in role.optimizer.owned_slices()]
        locals_ = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
        held = sum(each.untyped_storage().nbytes() for each in locals_)
        assert (held == 0) == self.parks

    def rollout(self):
        prompts = BatchedDataDict(
            {
                "input_ids": make_batch()["input_ids"][:, :4],
                "input_lengths": torch.full((ROWS,), 4),
                "sample_ids": torch.arange(ROWS),
            }
        )
        self.handle.prepare_for_generation()
        self.seen.append(self.handle.generate(prompts, seed=3)["output_ids"])
        self.handle.finish_generation()
        self.check_away()

    def score(self):
        self.handle.prepare_for_lp_inference()
        batch = make_batch()
        self.seen.append(self.handle.get_logprobs(batch)["logprobs"])
        self.seen.append(self.handle.get_reference_policy_logprobs(batch)["reference_logprobs"])
        self.handle.finish_inference()
        self.check_away()

    def train(self):
        self.handle.prepare_for_training()
        self.seen.append(self.handle.train(make_batch(), PPOPolicyLoss()))
        self.handle.finish_training()
        self.check_away()

    def refit(self):
        self.handle.offload_before_refit()
        names = self.worker.hf_weight_names()
        self.seen += [tensor.clone() for _, tensor in self.worker.hf_weights(names)]
        self.handle.offload_after_refit()
        self.check_away()

    def save(self):
        """In the background, from where it is; the next phases run beside the writer."""
        self.saves += 1
        folder = self.folder / str(self.saves)
        self.handle.begin_saving(folder, in_background=True)
        self.rollout()
        self.train()
        self.handle.check_saving(wait=True)
        seal(folder, self.handle.num_shares)
        return folder

    def steps(self):
        for _ in range(2):
            self.rollout()
            self.score()
            self.train()
            self.refit()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_phase_is_the_same_with_and_without(tiny_nemo, tmp_path, variant, monkeypatch):
    stays = Run(tiny_nemo, tmp_path / "stays", parks=False, **variant)
    stays.steps()
    monkeypatch.setattr(accelerator, "is_apart", lambda tensor: True)
    goes = Run(tiny_nemo, tmp_path / "goes", parks=True, **variant)
    goes.steps()
    assert_equal(goes.seen, stays.seen)

    # A state saved while it is away, and what came after it, are one's that never was.
    (tmp_path / "goes").mkdir()
    state, before = goes.save(), len(goes.seen)
    goes.steps()
    again = Run(tiny_nemo, tmp_path / "again", parks=True, **variant)
    again.handle.load_state(state)
    again.rollout()
    again.train()
    again.steps()
    assert_equal(again.seen, goes.seen[before - 2 :])
    goes.handle.save_checkpoint(str(tmp_path / "goes.nemo"))  # while it is away
    again.handle.save_checkpoint(str(tmp_path / "again.nemo"))
    with open_nemo(tmp_path / "goes.nemo") as one, open_nemo(tmp_path / "again.nemo") as other:
        assert_equal(dict(one.weights), dict(other.weights))
    assert goes.worker.has_finite_weights()
