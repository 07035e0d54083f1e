"""Offload between phases: bytes per second to the host and back.

    python -m benchmarks.gpu.offload

Adam's moments (``offload_adam_states``), a parked model (weights there and back, gradients freed
and made zero again), and an exchange with a reference that is held in host memory.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu import machine

if __name__ == "__main__":
    machine.choose_device()

from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel
from aligner.models.worker import RoleWorker
from benchmarks.gpu import roles
from benchmarks.shapes import SHAPES

_TOKENS = 16  # of the update that makes the moments


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print one line."""
    shape = SHAPES[options.shape]
    with machine.Machine(options).running() as bench:
        role = roles.build(
            MegatronGPTActorModel, shape, offload_adam_states=True, micro_batch_size=1
        )
        role.keep_reference("swap")
        role.loss_fn = PPOPolicyLoss(needs_entropy=False)
        role.prepare_for_training()
        role.training_update(roles.batch(1, _TOKENS, 1, shape.vocab_size))
        worker = RoleWorker(role, role.parallel)
        device = str(next(role.gpt.parameters()).device)
        weights = sum(p.nbytes for p in role.gpt.parameters())
        count = roles.parameters_of(role)

        def exchange() -> None:
            with role.reference.initial_model():
                pass

        result = {
            "moments": _there_and_back(
                bench, 8 * count, role.prepare_for_inference, role.prepare_for_training
            ),
            "parked": _there_and_back(
                bench,
                weights,
                lambda: worker.move_model(role.model, "cpu"),
                lambda: worker.move_model(role.model, device),
            ),
            "reference": {"bytes": weights, **bench.measure(exchange)},
        }
        return machine.report(options, "offload", parameters=count, **result)


def _there_and_back(
    bench: machine.Machine, size: int, leave: Callable[[], object], come: Callable[[], object]
) -> dict[str, Any]:
    """Measure both directions. ``freed_bytes`` is the memory freed in between."""
    bytes_before = bench.alive_bytes()
    leave()
    bench.wait()
    bytes_after = bench.alive_bytes()
    come()
    result: dict[str, Any] = {"bytes": size}
    if bytes_before is not None and bytes_after is not None:
        result["freed_bytes"] = bytes_before - bytes_after

    def both() -> None:
        leave()
        come()

    cost = bench.measure(both)
    result["there_and_back"] = cost
    if "seconds" in cost:
        result["bytes_per_s"] = 2 * size / cost["seconds"]
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line."""
    return measure(machine.parser_of(__doc__).parse_args(arguments))


if __name__ == "__main__":
    main()
