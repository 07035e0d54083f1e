"""The samples of a report: the same prompts before and after, then the first and the last."""

from collections.abc import Sequence
from html import escape

from aligner.observe.report.chart import short_number
from aligner.observe.report.page import section
from aligner.observe.samples import Sample

_MOST_ROWS = 12
_MOST_CHARACTERS = 4000


def samples_section(samples: Sequence[Sample]) -> str:
    """Tables of samples; empty text where there are none."""
    if not samples:
        return ""
    parts = []
    paired = before_and_after(samples)
    if paired:
        parts.append(_heading(f"Step {paired[0][0].step} against step {paired[0][1].step}"))
        parts.append(_paired_table(paired[:_MOST_ROWS]))
    training = [sample for sample in samples if sample.split == "train"]
    steps = sorted({sample.step for sample in training})
    for step, name in zip(steps[:1] + steps[1:][-1:], ("First", "Last"), strict=False):
        rows = [sample for sample in training if sample.step == step]
        parts.append(_heading(f"{name} training samples, step {step}"))
        parts.append(plain_table(rows[:_MOST_ROWS]))
    return section(
        "What the model says", "Responses as they were sampled, with their rewards.", "".join(parts)
    )


def before_and_after(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Validation samples of the first and of the last validation that share their prompt."""
    held_out = [sample for sample in samples if sample.split == "val"]
    if not held_out:
        return []
    first_step, last_step = held_out[0].step, held_out[-1].step
    last = {sample.prompt: sample for sample in held_out if sample.step == last_step}
    firsts = {sample.prompt: sample for sample in held_out if sample.step == first_step}
    if first_step == last_step:
        return []
    return [(first, last[prompt]) for prompt, first in firsts.items() if prompt in last]


def _heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def _paired_table(pairs: Sequence[tuple[Sample, Sample]]) -> str:
    rows = (
        f"<tr>{_text(first.prompt)}{_text(first.ground_truth or '')}"
        f"{_text(first.response)}{_reward(first)}{_text(last.response)}{_reward(last)}</tr>"
        for first, last in pairs
    )
    head = ("prompt", "ground truth", "before", "reward", "after", "reward")
    return _table(head, "".join(rows))


def plain_table(samples: Sequence[Sample]) -> str:
    """A table of prompts, responses and rewards."""
    rows = (
        f"<tr>{_text(one.prompt)}{_text(one.ground_truth or '')}{_text(one.response)}"
        f'{_reward(one)}<td class="number">{one.response_length}{"" if one.is_end else " (cut)"}'
        "</td></tr>"
        for one in samples
    )
    return _table(("prompt", "ground truth", "response", "reward", "tokens"), "".join(rows))


def _table(head: Sequence[str], rows: str) -> str:
    columns = "".join(
        f'<th class="{"number" if name in ("reward", "tokens") else ""}">{escape(name)}</th>'
        for name in head
    )
    return f'<div class="card scroll"><table class="samples"><tr>{columns}</tr>{rows}</table></div>'


def _text(text: str) -> str:
    cut = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " …"
    return f'<td class="text"><div class="long">{escape(cut)}</div></td>'


def _reward(sample: Sample) -> str:
    mood = "up" if sample.reward > 0 else "down"
    return f'<td class="number {mood}">{short_number(sample.reward)}</td>'
