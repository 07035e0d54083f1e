"""Rollouts on the dry device: what one more token of every sequence costs."""

from dry_roles import ROWS, build, rollout, settings_of, share_of_batch

import aligner.models.gpt.incremental as incremental
from aligner.config import LengthParams
from aligner.dry.device import DryDevice

FEW, MANY = 6, 14


def per_token(**case):
    """Launches, host reads and products of one decoding step; dtype of the logits drawn from."""
    case = {"role": "actor", "trained": False, "precision": "bf16", **case}
    dtypes = set()
    plain = incremental.IncrementalModel.logits

    def logits(model, hidden):
        found = plain(model, hidden)
        dtypes.add(str(found.dtype))
        return found

    incremental.IncrementalModel.logits = logits
    with DryDevice(case.get("world", 1)) as device:
        role = build(case)
        batch, _ = share_of_batch(case, role.parallel.dp_rank, role.parallel.dp_size)
        records = []
        for length in (FEW, MANY):
            sampling = settings_of(case).sampling_params
            role.configure_generation(LengthParams(max_length=length), sampling, ROWS)
            with device.record() as record:
                rollout(role, batch)
            records.append(record)
    few, many = records
    steps = MANY - FEW
    flops = {str(d): (many.flops[d] - few.flops[d]) / steps for d in many.flops}
    return {
        "launches": (many.launches - few.launches) / steps,
        "host_reads": (many.host_reads - few.host_reads) / steps,
        "flops": {name: n for name, n in flops.items() if n},
        "logits": sorted(dtypes),
        "collectives": {
            str(each): calls - few.collectives.get(each, (0, 0))[0]
            for each, (calls, _) in many.collectives.items()
        },
    }
