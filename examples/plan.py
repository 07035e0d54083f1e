"""Estimate memory and time of a training run on given devices, and the number of devices.

python examples/plan.py --config-name recipes/sft_tiny_cpu plan.device=h100-80g
"""

import sys
from pathlib import Path

from aligner.config import BaseRunConfig
from aligner.config.cli import launch, reported_errors
from aligner.foreign_keys import shown
from aligner_plan.dry.guard import load_guard
from aligner_plan.options import PlanConfig, plan_request


def main() -> None:
    """Compose the configuration of the command line, and plan the run."""
    conf = Path(__file__).parents[1] / "conf"
    request = plan_request(sys.argv[1:], conf)
    if {"-h", "--help"} & {*request.arguments}:
        print("usage: aligner plan [--config-name NAME] [plan.KEY=VALUE ...] [key=value ...]\n")
        for key, value in vars(PlanConfig()).items():
            print(f"plan.{key}: {shown(value)}")
        print("\ndocs/plan.md describes these keys. The others are those of the training script:\n")
    shows_only = {"-h", "--help", "-c", "--cfg"} & {*request.arguments}
    if not shows_only and "torch" not in sys.modules:
        load_guard()  # before a user's file in the configuration imports torch

    def run(config: BaseRunConfig) -> None:
        load_guard()
        from aligner_plan.command import run_plan

        run_plan(config, request.plan)

    sys.argv[1:] = request.arguments
    launch(run, conf_dir=conf, config_name=request.config_name, root=request.root)


if __name__ == "__main__":
    with reported_errors():
        main()
