"""Scoring and updates of one role at full size: seconds, tokens per second, MFU, peak memory.

    python -m benchmarks.gpu.update --tokens 8192
    python -m benchmarks.gpu.update --tokens 16384 --role critic --recompute full

One packed micro-batch, random weights, bfloat16. An update is forward, backward, gradient norm,
clipping and AdamW. MFU counts what the model needs, not what is computed twice: 6 operations a
token and weight that multiplies (the output layer included, the embedding's lookup not) and
causal attention, over the card's dense bfloat16 peak. Aim: 45 % for the actor on one H200.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import machine

if __name__ == "__main__":
    machine.choose_device()

from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, MegatronGPTModel
from benchmarks.gpu import rates, roles
from benchmarks.shapes import SHAPES

# Role, loss, and the method that scores.
ROLES: dict[str, tuple[type[MegatronGPTModel], Any, str]] = {
    "actor": (MegatronGPTActorModel, PPOPolicyLoss(needs_entropy=False), "get_logprobs"),
    "critic": (MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2), "get_values"),
}


def model_flops(role: MegatronGPTModel, tokens: int, sequence: int) -> float:
    """Count the operations of forward and backward for ``tokens``, none twice.

    Three times the forward pass, whose products with weights are 2 operations a weight and token,
    and whose causal attention is 2 · width · sequence a token and layer (half of the square).
    """
    shape = role.architecture
    weights = sum(p.numel() for p in role.gpt.parameters() if p.dim() > 1)
    if not shape.tie_embeddings or role.head_outputs:  # else the lookup's table is the output layer
        weights -= shape.vocab_size * shape.hidden_size
    attention = 2 * shape.num_attention_heads * shape.kv_channels * sequence * shape.num_layers
    return 3.0 * tokens * (2 * weights + attention)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print one line."""
    cls, loss, score = ROLES[options.role]
    rows = options.tokens // options.sequence
    shape = SHAPES[options.shape]
    plan = machine.planned_amounts(
        options,
        "update",
        role=options.role,
        rows=rows,
        sequence=options.sequence,
        precision=options.precision,
        recompute=options.recompute,
    )
    with machine.Machine(options).running() as bench:
        role = roles.build(
            cls,
            shape,
            precision=options.precision,
            recompute=options.recompute,
            sequence_packing=True,
            micro_batch_size=rows,
            forward_micro_batch_size=rows,
        )
        role.setup_training()
        bench.holds(role.gpt)
        role.loss_fn = loss
        data = roles.batch(rows, options.sequence, options.sequence // 8, shape.vocab_size)
        role.prepare_for_training()
        static = bench.alive_bytes()
        update = bench.measure(lambda: role.training_update(data), plan.get("update"))
        kernels = bench.kernels(lambda: role.training_update(data)) if options.profile else None
        alive_bytes = bench.alive_bytes()
        role.prepare_for_inference()
        scoring = bench.measure(lambda: getattr(role, score)(data), plan.get("scoring"))
        needed_flops = model_flops(role, options.tokens, options.sequence)
        for part, flops in ((update, needed_flops), (scoring, needed_flops / 3)):
            part["model_flops"] = flops
            if "seconds" in part:
                part["tokens_per_s"] = options.tokens / part["seconds"]
                part["mfu"] = rates.share_of_peak(flops / part["seconds"])
        return machine.report(
            options,
            "update",
            parameters=roles.parameters_of(role),
            static_bytes=static,  # weights and gradients, before the first step makes moments
            held_bytes=alive_bytes,  # with the moments
            update=update,
            scoring=scoring,
            **({} if kernels is None else {"kernels": kernels}),
        )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line."""
    parser = machine.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the packed micro-batch")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of each sequence in it")
    parser.add_argument("--role", choices=sorted(ROLES), default="actor")
    parser.add_argument("--precision", choices=["bf16", "32"], default="bf16")
    parser.add_argument("--recompute", choices=["full", "selective"])
    parser.add_argument("--profile", action="store_true", help="kernels of one update by name")
    return measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
