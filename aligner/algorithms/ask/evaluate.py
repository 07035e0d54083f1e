"""An evaluation: prompts, a verifier or reward, and what a model's answers come to."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from aligner.algorithms.ask.model import AskedModel, open_asked_model, write_answers
from aligner.algorithms.rollout.inputs import longest_opening, open_environments
from aligner.algorithms.rollout.reward_source import load_reward
from aligner.algorithms.rollout.validation import Evaluation, Judge, ask
from aligner.checkpoint.durable import atomic_file, write_json
from aligner.config import EvaluateConfig
from aligner.data.prompts import EpisodeDataset, PromptDataset, columns_of_rows
from aligner.device import accelerator
from aligner.observe.report.evaluation import EvaluatedSet, render_evaluation, shown_name
from aligner.packages import describe_environment
from aligner.parallel.collectives import is_rank_zero, on_rank_zero

DEFAULT_SET = "prompts"  # what data.prompts is called


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Ask, judge, and write `evaluation.json`, `answers.jsonl` and `report.html`; the numbers."""
    with ExitStack() as closing:
        asked = open_asked_model(config, closing)
        console = Console(quiet=not is_rank_zero(), highlight=False, soft_wrap=True)
        sets = _sets(config, asked)
        longest = max(prompts.max_length for prompts in sets.values())
        asked.check_room(longest)
        columns = frozenset.intersection(*(prompts.column_names for prompts in sets.values()))
        source = load_reward(asked.run, asked.engine, asked.tokenizer, columns, closing)
        rows = columns_of_rows({f"data.sets.{name}": each for name, each in sets.items()})
        talks = open_environments(asked.run, asked.tokenizer, asked.architecture, rows, closing)
        engine, workers = asked.start(longest, console.print)
        judge = Judge.of(source.start(workers), config.final_answer, "final_answer")
        asking = asked.asking(engine, config.sampling.samples_per_prompt)
        if talks is not None:
            asking = replace(asking, source=talks)
        found = {
            name: judge.evaluate(ask(asking, prompts), asking.samples_per_prompt)
            for name, prompts in sets.items()
        }
        numbers = _numbers(config, asked.source.name, found)
        on_rank_zero(lambda: _write(config, numbers, found))
        console.print(_table(numbers))
        console.print(f"report  {Path(config.output) / 'report.html'}")
    return numbers


def _sets(config: EvaluateConfig, asked: AskedModel) -> dict[str, PromptDataset]:
    data = config.data
    sources = {} if data.prompts is None else {DEFAULT_SET: data.prompts}
    sources |= data.sets
    if not config.environment.is_set:
        return {
            name: PromptDataset.load(source, asked.tokenizer, data)
            for name, source in sources.items()
        }
    longest = longest_opening(asked.run, asked.architecture)
    truth = data.ground_truth_column
    return {name: EpisodeDataset.read(source, longest, truth) for name, source in sources.items()}


def _numbers(config: EvaluateConfig, model: str, found: dict[str, Evaluation]) -> dict[str, Any]:
    """Contents of ``evaluation.json``."""
    return {
        "model": model,
        "samples_per_prompt": config.sampling.samples_per_prompt,
        "sets": {
            name: {
                "prompts": one.batch.size // one.samples_per_prompt,
                "estimates": {
                    shown_name(key): {"value": estimate.value, "stderr": estimate.error}
                    for key, estimate in one.estimates.items()
                },
                "metrics": {key: value for key, value in one.metrics.items() if value == value},
            }
            for name, one in found.items()
        },
        "config": config.as_dict(),
        "command": shlex.join(sys.argv),
    }


def _write(config: EvaluateConfig, numbers: dict[str, Any], found: dict[str, Evaluation]) -> None:
    folder = Path(config.output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "evaluation.json", numbers)
    lines = (line for name, one in found.items() for line in _answers(name, one))
    write_answers(folder / "answers.jsonl", lines)
    page = render_evaluation(
        numbers["model"],
        {
            name: EvaluatedSet(
                one.batch.size // one.samples_per_prompt,
                one.samples_per_prompt,
                one.estimates,
                one.metrics,
                one.shown(0, config.samples_shown),
            )
            for name, one in found.items()
        },
        config=yaml.safe_dump(config.as_dict(), sort_keys=False),
        environment=describe_environment(accelerator.description()),
    )
    with atomic_file(folder / "report.html") as file:
        file.write(page.encode())


def _answers(name: str, one: Evaluation) -> Iterator[dict[str, Any]]:
    """A line for each response; of a conversation with its turns, its end and its columns."""
    batch = one.batch
    lengths = (batch["input_lengths"] - batch["prompt_lengths"]).tolist()
    for row in range(batch.size):
        line = {
            "set": name,
            "prompt": batch["prompts"][row],
            "ground_truth": batch["ground_truths"][row],
            "response": batch["responses"][row],
            "sample": row % one.samples_per_prompt,
            "reward": batch["rewards"][row].item(),
            "is_right": batch["is_right"][row].item(),
            **({"answer": batch["answers"][row]} if "answers" in batch else {}),
            "tokens": lengths[row],
            "is_end": bool(batch["is_end"][row]),
        }
        if "turns" in batch:
            line["is_scored"] = bool(batch["is_scored"][row])
            line["end_reason"] = batch["end_reasons"][row]
            line["turns"], line["columns"] = batch["turns"][row], batch["columns"][row]
        yield line


def _table(numbers: dict[str, Any]) -> Table:
    table = Table(title=f"{numbers['model']}, {numbers['samples_per_prompt']} answers a prompt")
    table.add_column("")
    for name, one in numbers["sets"].items():
        table.add_column(f"{name}, {one['prompts']} prompts", justify="right")
    keys = dict.fromkeys(key for one in numbers["sets"].values() for key in one["estimates"])
    for key in keys:
        values = [one["estimates"][key] for one in numbers["sets"].values()]
        table.add_row(
            key,
            *(
                f"{value['value']:.3f}"
                + ("" if value["stderr"] is None else f" ± {value['stderr']:.3f}")
                for value in values
            ),
        )
    return table
