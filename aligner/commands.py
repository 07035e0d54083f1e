"""The command `aligner`: every script of `examples/` under a short name, from anywhere.

`aligner train-ppo …` is `python examples/train_gpt_ppo.py …`: the script itself is run, so there is
one implementation, and what a run starts again (a process per device, a stage of a pipeline) is a
file with a path. Nothing heavy is imported before the script needs it.
"""

import difflib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import aligner
from aligner.catalog import ALGORITHMS


class Command(NamedTuple):
    """A script of `examples/`, without its suffix, and its purpose."""

    script: str
    summary: str
    arguments: tuple[str, ...] = ()  # that stand before the user's


COMMANDS: dict[str, Command] = {
    **{f"train-{one.name}": Command(one.script, one.summary) for one in ALGORITHMS.values()},
    "generate": Command("generate", "answers to prompts"),
    "chat": Command("generate", "a conversation in the terminal", ("--chat",)),
    "evaluate": Command("evaluate", "mean@k, pass@k, maj@k of a model on held-out prompts"),
    "compare": Command("compare", "training runs and evaluations on one page"),
    "pipeline": Command("pipeline", "several runs, each from what an earlier one left"),
    "convert": Command("convert", "a Hugging Face directory or GGUF to a .nemo, or a .nemo back"),
    "merge-lora": Command("merge_lora", "adapters into the model they were trained on"),
    "plan": Command("plan", "what a training run takes on devices that are not here"),
    "check-metrics": Command("check_metrics", "a run's metrics against thresholds, at a step"),
    "translate": Command("translate", "a configuration of NeMo-RL or NeMo-Aligner as a command"),
    "convert-lora": Command("convert_lora_to_peft", "adapters to Hugging Face's PEFT"),
    "serve": Command("serve", "a model behind OpenAI's HTTP interface"),
    "serve-reward": Command("serve_reward_model", "a reward model behind HTTP"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: ``aligner COMMAND …``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if given[0] in ("-V", "--version"):
        print(f"aligner {aligner.__version__}")
        return
    name = given[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        meant = f". Did you mean {near[0]}?" if near else ""
        sys.exit(f"aligner {name}: no such command{meant}\n\n{usage()}")
    script = shipped("examples") / f"{COMMANDS[name].script}.py"
    sys.argv = [str(script), *COMMANDS[name].arguments, *given[1:]]
    runpy.run_path(str(script), run_name="__main__")


def shipped(folder: str) -> Path:
    """``conf`` or ``examples``: within the installed package, in a checkout beside it."""
    package = Path(aligner.__file__).parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def usage() -> str:
    """Text that ``aligner --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: aligner COMMAND [ARGUMENT ...]",
            "",
            "Align language models on megatron-core.",
            "",
            *lines,
            "",
            "`aligner COMMAND --help` lists a command's options. Recipes that train-* find by",
            f"--config-name recipes/NAME are in {shipped('conf') / 'recipes'}.",
        ]
    )


if __name__ == "__main__":
    main()
