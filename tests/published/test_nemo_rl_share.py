"""Share of NeMo-RL's published sections that are read, as far as a list of their keys can show it.

The list has the values of each key and the number of sections with each, and not which values stand
together. Three numbers follow: a lower bound, as if every refused feature stood in a section of its
own; an upper bound, as if all stood together; and the share if they fell independently of each
other. A refused value of a backend's section is counted as if the backend were enabled there, which
the list does not say either.
"""

import json
import math
from pathlib import Path

import pytest

from aligner.config.roles.policy import check_policy_backend
from aligner.config.translation.nemo_rl import read_role
from aligner.errors import ConfigError

KEYS = Path(__file__).parents[3] / "shared" / "data" / "nemo_rl_policy_keys.json"
BACKENDS = ("megatron_cfg", "dtensor_cfg")
MOE = "megatron_cfg.moe_router_"
# Keys with the same counts and the same values, which ask for one feature.
TOGETHER = {"generation.quant_cfg": "quant_cfg", "generation.real_quant": "quant_cfg"}


def is_refused(name, backend, path, value, switch):
    """Whether a value is refused in a section that has little else."""
    section = {"model_name": "m.nemo", backend: {"enabled": True}}
    for each, setting in (switch, True), (path, value):
        *sections, key = each.split(".")
        place = section
        for each_name in sections:
            place = place.setdefault(each_name, {})
        place[key] = setting
    role, notes = read_role(section, name)
    if role is None:
        return any(f"{name}.{path}".startswith(row[0]) for row in notes.refused)
    try:
        check_policy_backend(role.backend, role.model)
    except ConfigError:
        return True
    return False


def features(name, seen, backend, sections):
    """Sections with the backend, and the share of them that each refused feature may stand in."""
    enabled, found = seen[f"{backend}.enabled"]["true"], {}
    for path, counts in seen.items():
        top, section = path.partition(".")[0], path.rpartition(".")[0]
        if top in BACKENDS and (top != backend or path == f"{backend}.enabled"):
            continue
        switch, feature = f"{backend}.enabled", TOGETHER.get(path, path)
        if f"{section}.enabled" in seen and section not in BACKENDS:  # what is off says nothing
            switch, feature = f"{section}.enabled", section
        count = sum(
            count
            for text, count in counts.items()
            if is_refused(name, backend, path, json.loads(text), switch)
        )
        count = min(count, seen[switch].get("true", 0))
        share = min(1, count / (enabled if top in BACKENDS else sections))
        found[feature] = max(found.get(feature, 0), share)
    if backend == "megatron_cfg":  # what only sections with many experts are refused for

        def share(path, *neutral):
            return 1 - sum(seen.get(path, {}).get(text, 0) for text in neutral) / sections

        parallel = seen["megatron_cfg.expert_model_parallel_size"]
        of_experts = min(1, sum(n for size, n in parallel.items() if size != "1") / enabled)
        held = seen[f"{MOE}load_balancing_type"]
        found["balanced experts"] = held.get('"aux_loss"', 0) / sections * of_experts
        biased = seen.get(f"{MOE}enable_expert_bias", {}).get("true", 0) / enabled
        moved = seen[f"{MOE}bias_update_rate"].get("0.001", 0) / sections
        found["biased experts"] = biased * moved
    return enabled, {feature: share for feature, share in found.items() if share}


def shares(data):
    """Shares that are read: lower bound, independent features, upper bound; and the features."""
    total, read, rows = 0, [0.0, 0.0, 0.0], {}
    for version in data.values():
        for role in ("policy", "value"):
            seen = {
                path.removeprefix(f"{role}."): counts
                for path, counts in version["keys"].items()
                if path.startswith(f"{role}.")
            }
            sections = sum(seen.get("train_global_batch_size", {}).values())
            for backend in BACKENDS if seen else ():
                enabled, found = features(role, seen, backend, sections)
                total += enabled
                read[0] += enabled * max(0, 1 - sum(found.values()))
                read[1] += enabled * math.prod(1 - share for share in found.values())
                read[2] += enabled * (1 - max(found.values(), default=0))
                for feature, share in found.items():
                    rows[feature] = rows.get(feature, 0) + share * enabled
    return [part / total for part in read], rows, total


@pytest.mark.skipif(not KEYS.exists(), reason="needs the list of NeMo-RL's published keys")
def test_most_published_sections_are_read():
    found, rows, total = shares(json.loads(KEYS.read_text()))
    assert total == 173
    table = "\n".join(f"{n:5.1f} {key}" for key, n in sorted(rows.items(), key=lambda row: -row[1]))
    assert [share >= least for share, least in zip(found, (0.79, 0.8, 0.8), strict=True)] == (
        [True] * 3
    ), f"{found}\n{table}"
