"""Columns that a student's batch lacks: its own responses, and the teacher's log-probs of them.

offline     examples ──────────────────────────► teacher: top k of each learned token ─► loss
on-policy   prompts ─► student: a response each ─► teacher: top k of each token ───────► loss
"""

from dataclasses import dataclass

from aligner.algorithms.rollout.rollout import VALIDATION_SEED_OFFSET, generate, rollout_of
from aligner.algorithms.rs.trainer import TRAIN_COLUMNS
from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.cluster.dispatch import columns_of
from aligner.models.policy.lm_policy import Policy


@dataclass(frozen=True)
class TeacherTargets:
    """Completes the batches of a distillation run; see `Task` of `supervised.trainer`.

    Args:
        teacher: a frozen model.
        top_k: of its tokens that the loss reads.
        vocab_size: the token ids that student and teacher share are those below it.
        seed: of the student's responses; None: the batch has responses.
    """

    teacher: Policy
    top_k: int
    vocab_size: int
    seed: int | None = None

    def __call__(self, student: Policy, batch: BatchedDataDict, consumed: int | None) -> None:
        """Add ``teacher_topk_logits`` and ``teacher_topk_indices`` [B, S, k].

        Where the student samples, ``batch`` is a `prompts_batch` and becomes its responses: each
        training prompt is a sample of its own, and every validation draws with the same random
        numbers.
        """
        if self.seed is not None:
            _respond(student, batch, self.seed, consumed)
        self.teacher.prepare_for_lp_inference()
        best = self.teacher.get_topk_logits(batch, self.top_k, self.vocab_size)
        batch["teacher_topk_logits"] = best["topk_logits"].cpu()
        batch["teacher_topk_indices"] = best["topk_indices"].cpu()
        self.teacher.finish_inference()


def _respond(student: Policy, batch: BatchedDataDict, seed: int, consumed: int | None) -> None:
    """Replace prompts by the student's responses to them, in place."""
    if consumed is None:
        seed += VALIDATION_SEED_OFFSET
    batch["sample_ids"] = batch["sample_ids"] + (consumed or 0)
    rollout = rollout_of(batch, generate(student, batch, seed=seed))
    batch.data = columns_of(rollout, TRAIN_COLUMNS).data
