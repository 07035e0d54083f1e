"""Sampled responses, which ``samples.jsonl`` contains, and their table on the console."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from aligner.observe.jsonl import read_lines


@dataclass(frozen=True)
class Sample:
    """One prompt with its response or conversation. Lengths are in tokens."""

    step: int
    split: Literal["train", "val"]
    prompt: str
    response: str
    reward: float
    prompt_length: int
    response_length: int
    is_end: bool  # the model ended the response, not the length limit
    ground_truth: str | None = None
    sample_id: int | None = None
    turns: list[dict[str, Any]] | None = None  # of a conversation, each with its reward


def read_samples(path: Path) -> list[Sample]:
    """Read all complete lines of a ``samples.jsonl``, oldest first. Other records are left out."""
    samples = []
    for record in read_lines(path):
        with suppress(KeyError, TypeError, ValueError):
            samples.append(Sample(**{**record, "reward": float(record["reward"])}))
    return samples


def sample_table(samples: Sequence[Sample]) -> Table:
    """Build a console table of one split's samples, at least one, with the ends of prompts."""
    kind = "training" if samples[0].split == "train" else "validation"
    title = f"{kind} samples of step {samples[0].step}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", show_lines=True)
    for column, style in (("prompt", "dim"), ("response", ""), ("truth", "dim"), ("reward", "")):
        table.add_column(column, style=style, overflow="fold")
    table.add_column("tokens", justify="right")
    for sample in samples:
        prompt = sample.prompt if len(sample.prompt) <= 160 else "…" + sample.prompt[-160:]
        # Show line ends, because it matters where a response ends, but no control codes.
        response = "".join(
            char if char.isprintable() or char == "\n" else "\ufffd"
            for char in sample.response.replace("\n", "⏎\n")
        )
        tokens = f"{sample.response_length}{'' if sample.is_end else ' (cut)'}"
        table.add_row(
            Text(prompt),  # Text: brackets in the model's words are not markup
            Text(response),
            Text(sample.ground_truth or ""),
            Text(f"{sample.reward:.4g}", style="green" if sample.reward > 0 else "red"),
            tokens,
        )
    return table
