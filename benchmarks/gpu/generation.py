"""Generation by the built-in sampler: tokens per second and launches a step.

    python -m benchmarks.gpu.generation --in-flight 16 64 256 512

One line for each number of sequences in flight, all of which sample exactly ``--new-tokens`` at
temperature 1. ``step_s`` and what is counted a step are differences of a long and a short rollout,
so prefill and set-up are not in them. ``floor_s`` is what reading weights and cache once takes at
the card's memory rate. Aim: 30,000 tokens/s at 64 in flight on one H200.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu import machine

if __name__ == "__main__":
    machine.choose_device()

import torch

from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.device import accelerator
from aligner.models.gpt import MegatronGPTActorModel
from benchmarks.gpu import rates, roles
from benchmarks.shapes import SHAPES

_COUNTED = (4, 8)  # steps of the two rollouts whose kernels are counted


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a line for each number of prompts in flight."""
    shape = SHAPES[options.shape]
    sampling = SamplingParams(top_p=options.top_p)
    plans = {
        rows: machine.planned_amounts(
            options,
            "generation",
            in_flight=rows,
            prompt=options.prompt_tokens,
            response=options.new_tokens,
            precision=options.precision,
            top_p=options.top_p,
        )
        for rows in options.in_flight
    }
    with machine.Machine(options).running() as bench:
        actor = roles.build(
            MegatronGPTActorModel,
            shape,
            precision=options.precision,
            sampling_params=sampling,
            **roles.generation_settings(max(options.in_flight), options.new_tokens),
        )
        actor.prepare_for_inference()
        weights = sum(p.nbytes for p in actor.gpt.parameters())

        def rollout(rows: int, new_tokens: int) -> Callable[[], object]:
            prompts = torch.randint(3, shape.vocab_size, (rows, options.prompt_tokens))
            prompts = prompts.to(accelerator.device())
            lengths = torch.full((rows,), options.prompt_tokens).to(prompts.device)
            ids = torch.arange(rows).to(prompts.device)
            length = LengthParams(max_length=new_tokens, min_length=new_tokens)
            sampling_options = SamplingOptions(length, sampling)
            return lambda: actor.generator.sample(
                prompts, lengths, ids, seed=1, sampling_options=sampling_options
            )

        lines = []
        for rows in options.in_flight:
            for steps in reversed(_COUNTED):  # the longer one's cache holds both
                rollout(rows, steps)()  # so that what is counted launches graphs that it kept
            few, more = (bench.kernels(rollout(rows, steps)) for steps in _COUNTED)
            steps = _COUNTED[1] - _COUNTED[0]
            result: dict[str, Any] = {
                f"{name}_per_step": (more[name] - few[name]) / steps
                for name in ("kernels", "launch_calls", "graph_launches", "host_reads")
                if name in more
            }
            if bench.device == "dry":
                result["peak_bytes"] = more["peak_bytes"]  # of a short rollout
                result["rollout"] = {"plan": plans[rows]["rollout"]}
            else:
                result |= _timed(bench, rollout, rows, options.new_tokens)
                card = rates.data_sheet() if bench.device == "cuda" else None
                if card is not None:
                    width = 2 * shape.num_query_groups * shape.kv_channels * shape.num_layers
                    tokens = rows * (options.prompt_tokens + options.new_tokens / 2)
                    read = weights + tokens * width * next(actor.gpt.parameters()).itemsize
                    result["floor_s"] = read / card[1]
            lines.append(
                machine.report(
                    options, "generation", in_flight=rows, weight_bytes=weights, **result
                )
            )
        return lines


def _timed(
    bench: machine.Machine, rollout: Callable[[int, int], Callable[[], object]], rows: int, new: int
) -> dict[str, Any]:
    """Measure the rate of whole rollouts, and the seconds of one step."""
    short = max(1, new // 8)
    few, complete = bench.measure(rollout(rows, short)), bench.measure(rollout(rows, new))
    return {
        "tokens_per_s": rows * new / complete["seconds"],
        "rollout": complete,
        "step_s": (complete["seconds"] - few["seconds"]) / (new - short),
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the command line."""
    parser = machine.parser_of(__doc__)
    parser.set_defaults(repeats=2, warmup=1)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--precision", choices=["bf16", "32"], default="bf16")
    return measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
