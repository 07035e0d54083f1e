"""Estimates of `plan` for a phase that a benchmark of this folder runs: seconds, peak on a card.

The role is by itself on the card, as in the benchmark: `aligner_plan.estimate.Estimator` measures
it on the dry device with few layers and extrapolates. So it runs in a process of ``--device dry``,
before the benchmark's own role is built on a separate dry device.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aligner.config.load import parse_config
from aligner.config.run import RunConfig
from aligner_plan.devices import device_named
from aligner_plan.estimate import Estimator
from aligner_plan.options import PlanConfig, varied
from aligner_plan.rehearsal import planned_run
from aligner_plan.roles import Phase, PlannedRole, PlannedRun
from benchmarks.shapes import SHAPES

_RUN = {"reward": {"function": "not.read:reward"}, "data": {"train": {"source": "not-read.jsonl"}}}
Planned = dict[str, dict[str, Any]]


def update(
    shape: str,
    card: str,
    *,
    role: str,
    rows: int,
    sequence: int,
    precision: str,
    recompute: str | None,
) -> Planned:
    """Estimate ``update`` and ``scoring`` of ``rows`` packed sequences by actor or critic."""
    packed = {"enabled": True, "train_mb_tokens": rows * sequence}
    run = _run(
        shape,
        {
            "trainer.precision": precision,
            "trainer.ppo.initial_policy_kl_penalty": 0.0,  # no reference
            "model.activations_checkpoint_granularity": recompute,
            "model.sequence_packing": packed,
            # Two updates, so that the first one's rows have to be scored before it.
            "model.ppo.num_rollout_samples": 2 * rows,
            **_batches(rows),
            "data.max_prompt_length": sequence // 2,
            "model.ppo.length_params.max_length": sequence - sequence // 2,
        },
    )
    name, scoring = ("policy", "logprobs") if role == "actor" else ("critic", "values")
    planned = run.roles[name]
    phases = {phase.name: phase for phase in planned.phases}
    train, score = phases["train"], phases[scoring]
    single, as_many = replace(train, times=1), replace(score, rows=rows)
    planned_phases = _estimated(run, replace(planned, phases=(single, as_many)), shape, card)
    return {"update": planned_phases["train"], "scoring": planned_phases[scoring]}


def generation(
    shape: str,
    card: str,
    *,
    in_flight: int,
    prompt: int,
    response: int,
    precision: str,
    top_p: float,
) -> Planned:
    """Estimate ``rollout`` of a policy that is not trained."""
    run = _run(
        shape,
        {
            "trainer.precision": precision,
            "model.ppo.num_rollout_samples": in_flight,
            "model.ppo.rollout_micro_batch_size": in_flight,
            "model.ppo.length_params.max_length": response,
            "model.ppo.sampling_params.top_p": top_p,
            **_batches(in_flight),
            "data.max_prompt_length": prompt,
        },
    )
    generate = next(phase for phase in run.roles["policy"].phases if phase.name == "generate")
    return {"rollout": _estimated(run, _frozen(run, generate), shape, card)["generate"]}


def refit(shape: str, card: str, *, buffer_bytes: int) -> Planned:
    """Estimate ``refit`` of a policy that is not trained, in groups of ``buffer_bytes``."""
    run = _run(shape, {"trainer.precision": "bf16"})
    role = _frozen(run, Phase("refit", buffer_bytes=buffer_bytes))
    return {"refit": _estimated(run, role, shape, card)["refit"]}


def save(shape: str, card: str) -> Planned:
    """Estimate ``save`` of a policy in training, the time that a step waits."""
    run = _run(shape, {"trainer.precision": "bf16", "trainer.ppo.initial_policy_kl_penalty": 0.0})
    policy = run.roles["policy"]
    phases = tuple(phase for phase in policy.phases if phase.name == "save")
    return {"save": _estimated(run, replace(policy, phases=phases), shape, card)["save"]}


def _run(shape: str, changes: Mapping[str, Any]) -> PlannedRun:
    """Return a run of PPO on one card."""
    config = parse_config({**_RUN, "model": {"restore_from_path": shape}, "critic": {}}, RunConfig)
    return planned_run(varied(config, changes), PlanConfig(), {shape: SHAPES[shape]})


def _batches(rows: int) -> dict[str, int]:
    """Return batches of one micro-batch per update, for both roles."""
    sizes = ("global_batch_size", "micro_batch_size")
    return {f"{role}.{size}": rows for role in ("model", "critic") for size in sizes}


def _frozen(run: PlannedRun, phase: Phase) -> PlannedRole:
    """Return a policy of weights alone, in one phase."""
    policy = run.roles["policy"]
    options = {**policy.options, "init_optimizer": False, "init_reference_model": False}
    return replace(policy, options=options, phases=(phase,))


def _estimated(run: PlannedRun, role: PlannedRole, shape: str, card: str) -> Planned:
    """Estimate one role: memory of the card and seconds, by phase."""
    estimator = Estimator(PlanConfig(), device_named(card), {shape: SHAPES[shape]})
    step = tuple((role.name, phase.name) for phase in role.phases)
    estimate = estimator.estimate_run(PlannedRun(run.config, {role.name: role}, step))
    planned_phases: Planned = {}
    for _, name in step:
        phase = estimate.phase(role.name, name)
        planned_phases[name] = {
            "card": card,
            "seconds": phase.seconds,
            "bound": phase.time.bound,
            "peak_bytes": round(phase.card_bytes),
        }
    return planned_phases
