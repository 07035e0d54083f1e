"""The command `aligner`, which runs scripts of `examples/` by short names from any folder.

`aligner train-ppo …` runs the file `examples/train_gpt_ppo.py`. Only the script imports large
modules.
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
    """A subcommand of `aligner`: a script of `examples/` and its purpose."""

    script: str  # file name without the suffix
    summary: str
    arguments: tuple[str, ...] = ()  # inserted before the user's arguments


COMMANDS: dict[str, Command] = {
    **{
        f"train-{entry.name}": Command(entry.script, entry.summary) for entry in ALGORITHMS.values()
    },
    "generate": Command("generate", "answers to prompts"),
    "chat": Command("generate", "a conversation in the terminal", ("--chat",)),
    "evaluate": Command("evaluate", "mean@k, pass@k, maj@k of a model on held-out prompts"),
    "compare": Command("compare", "training runs and evaluations on one page"),
    "pipeline": Command("pipeline", "several runs, each from the result of an earlier run"),
    "convert": Command("convert", "a Hugging Face directory or GGUF to a .nemo, or a .nemo back"),
    "merge-lora": Command("merge_lora", "adapters into the model they were trained on"),
    "plan": Command("plan", "memory and time of a training run on devices that you name"),
    "check-metrics": Command("check_metrics", "a run's metrics against thresholds, at a step"),
    "translate": Command("translate", "a configuration of NeMo-RL or NeMo-Aligner as a command"),
    "convert-lora": Command("convert_lora_to_peft", "adapters to Hugging Face's PEFT"),
    "make-tiny-model": Command(
        "tasks/tiny_model", "a tiny random model to try things with", ("--output",)
    ),
    "serve": Command("serve", "a model behind OpenAI's HTTP interface"),
    "serve-reward": Command("serve_reward_model", "a reward model behind HTTP"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script of ``aligner COMMAND …``. ``arguments``: by default those in ``sys.argv``."""
    name, *options = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return
    if name in ("-V", "--version"):
        print(f"aligner {aligner.__version__}")
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f". Did you mean {near[0]}?" if near else ""
        sys.exit(f"aligner {name}: no such command{hint}\n\n{usage()}")
    # Run the script as if it had been started with these arguments.
    script = shipped("examples") / f"{COMMANDS[name].script}.py"
    sys.argv = [str(script), *COMMANDS[name].arguments, *options]
    runpy.run_path(str(script), run_name="__main__")


def shipped(folder: str) -> Path:
    """Return the path of the folder ``conf`` or ``examples``, in the package or the checkout."""
    package = Path(aligner.__file__).parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def usage() -> str:
    """Return the text of ``aligner --help``."""
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
            "`aligner COMMAND --help` lists a command's options. Recipes for --config-name",
            f"recipes/NAME of train-* are in {shipped('conf') / 'recipes'}.",
        ]
    )


if __name__ == "__main__":
    main()
