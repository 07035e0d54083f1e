"""Evaluation of a model: sample responses to prompts, score them, and report the accuracy."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from aligner.algorithms.ask.model import open_model, write_answers
from aligner.algorithms.rollout.inputs import load_reward, open_environments, prompt_loader
from aligner.algorithms.rollout.validation import Evaluation, evaluate_responses, sample_responses
from aligner.checkpoint.durable import atomic_file, write_json
from aligner.config import EvaluateConfig
from aligner.data.prompts import columns_of_rows
from aligner.device import accelerator
from aligner.importing import load_function
from aligner.observe.report.evaluation import EvaluatedSet, render_evaluation, shown_name
from aligner.packages import describe_environment
from aligner.parallel.collectives import is_rank_zero, on_rank_zero

DEFAULT_SET = "prompts"  # name of the set data.prompts


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Sample and score responses to sets of prompts. Write and return estimates and metrics."""
    with ExitStack() as closing:
        # Describe the model, and read the prompts.
        model = open_model(config, closing)
        run, tokenizer, architecture = model.run, model.tokenizer, model.architecture
        console = Console(quiet=not is_rank_zero(), highlight=False, soft_wrap=True)
        sources = {} if config.data.prompts is None else {DEFAULT_SET: config.data.prompts}
        load = prompt_loader(run, config.data, tokenizer, architecture)
        sets = {name: load(source) for name, source in {**sources, **config.data.sets}.items()}
        longest = max(prompts.max_length for prompts in sets.values())
        model.check_room(longest)
        # Check reward and environments, which receive data columns, before loading the weights.
        names = frozenset.intersection(*(prompts.column_names for prompts in sets.values()))
        reward_source = load_reward(run, model.engine, tokenizer, names, closing)
        columns = columns_of_rows({f"data.sets.{name}": prompts for name, prompts in sets.items()})
        environments = open_environments(run, tokenizer, architecture, columns, closing)
        # Load the weights, then sample and score.
        engine, workers = model.start(longest, console.print)
        reward, per_prompt = reward_source.start(workers), config.sampling.samples_per_prompt
        final_answer = load_function(config.final_answer, key="final_answer")
        sampling = model.sampling(engine, per_prompt)
        if environments is not None:
            sampling = replace(sampling, source=environments)
        evaluations = {}
        for name, prompts in sets.items():
            batch = sample_responses(sampling, prompts)
            evaluations[name] = evaluate_responses(batch, per_prompt, reward, final_answer)
        # Write the results.
        results = _results(config, model.source.name, evaluations)
        on_rank_zero(lambda: _write(config, results, evaluations))
        console.print(_table(results))
        console.print(f"report  {Path(config.output) / 'report.html'}")
    return results


def _results(
    config: EvaluateConfig, model: str, evaluations: dict[str, Evaluation]
) -> dict[str, Any]:
    """Return the content of ``evaluation.json``, without metrics that are NaN."""
    return {
        "model": model,
        "samples_per_prompt": config.sampling.samples_per_prompt,
        "sets": {
            name: {
                "prompts": evaluation.batch.size // evaluation.samples_per_prompt,
                "estimates": {
                    shown_name(key): {"value": estimate.value, "stderr": estimate.error}
                    for key, estimate in evaluation.estimates.items()
                },
                "metrics": {
                    key: value for key, value in evaluation.metrics.items() if value == value
                },
            }
            for name, evaluation in evaluations.items()
        },
        "config": config.as_dict(),
        "command": shlex.join(sys.argv),
    }


def _write(
    config: EvaluateConfig, results: dict[str, Any], evaluations: dict[str, Evaluation]
) -> None:
    """Write ``evaluation.json``, ``answers.jsonl`` and ``report.html``."""
    folder = Path(config.output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "evaluation.json", results)
    answers = (_answers(name, evaluation) for name, evaluation in evaluations.items())
    write_answers(folder / "answers.jsonl", chain.from_iterable(answers))
    sets = {
        name: EvaluatedSet(
            results["sets"][name]["prompts"],
            evaluation.samples_per_prompt,
            evaluation.estimates,
            evaluation.metrics,
            evaluation.shown(0, config.samples_shown),
        )
        for name, evaluation in evaluations.items()
    }
    options = yaml.safe_dump(config.as_dict(), sort_keys=False)
    environment = describe_environment(accelerator.description())
    page = render_evaluation(results["model"], sets, config=options, environment=environment)
    with atomic_file(folder / "report.html") as file:
        file.write(page.encode())


def _answers(name: str, evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield the content of a line in ``answers.jsonl`` for each response."""
    batch = evaluation.batch
    lengths = (batch["input_lengths"] - batch["prompt_lengths"]).tolist()
    for row in range(batch.size):
        line = {
            "set": name,
            "prompt": batch["prompts"][row],
            "ground_truth": batch["ground_truths"][row],
            "response": batch["responses"][row],
            "sample": row % evaluation.samples_per_prompt,
            "reward": batch["rewards"][row].item(),
            "is_right": batch["is_right"][row].item(),
            **({"answer": batch["answers"][row]} if "answers" in batch else {}),
            "tokens": lengths[row],
            "is_end": bool(batch["is_end"][row]),
        }
        if "turns" in batch:  # conversations
            line["is_scored"] = bool(batch["is_scored"][row])
            line["end_reason"] = batch["end_reasons"][row]
            line["turns"], line["columns"] = batch["turns"][row], batch["columns"][row]
        yield line


def _table(results: dict[str, Any]) -> Table:
    """Return a table of estimates with standard errors. Rows: estimates. Columns: sets."""
    table = Table(title=f"{results['model']}, {results['samples_per_prompt']} answers per prompt")
    table.add_column("")
    sets = results["sets"]
    for name, set_results in sets.items():
        table.add_column(f"{name}, {set_results['prompts']} prompts", justify="right")
    estimates = [set_results["estimates"] for set_results in sets.values()]
    for key in dict.fromkeys(chain.from_iterable(estimates)):
        values = [set_estimates[key] for set_estimates in estimates]
        errors = [value["stderr"] for value in values]
        margins = ["" if error is None else f" ± {error:.3f}" for error in errors]
        cells = zip(values, margins, strict=True)
        table.add_row(key, *(f"{value['value']:.3f}{margin}" for value, margin in cells))
    return table
