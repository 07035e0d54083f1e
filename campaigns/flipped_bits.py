"""A `.nemo` file with one flipped bit: refused by name, or read as the whole file is."""

import hashlib
import sys
from pathlib import Path

import torch

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.errors import AlignerError
from campaigns.harness import TINY, Campaign, run

_CASES = 1000


def run_campaign(campaign: Campaign) -> None:
    """Read the intact file, then copies with random flipped bits."""
    path = campaign.folder / "flipped.nemo"
    intact = run(campaign, None, call=lambda: _read(TINY))
    campaign.record("the whole file", intact.verdict == "ok", intact.last)
    for case in campaign.while_time(range(_CASES)):
        data = bytearray(TINY.read_bytes())
        at, bit = campaign.rng.randrange(len(data)), campaign.rng.randrange(8)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        outcome = run(campaign, None, call=lambda: _read(path), timeout_s=60, memory_gib=14)
        equal = outcome.verdict == "ok" and outcome.last == intact.last
        note = "read as the whole one" if equal else f"{outcome.verdict}: {outcome.last}"
        campaign.record(f"{case}: bit {bit} of byte {at}", equal or outcome.status == 2, note)


def _read(path: Path) -> None:
    """Print a digest of all that a run takes from the file."""
    try:
        with open_nemo(path) as nemo:
            digest = hashlib.sha256(repr(nemo.architecture).encode())
            digest.update(repr(nemo.tokenizer.encode("1+1= hello")).encode())
            for name in sorted(nemo.weights):
                weight = nemo.weights[name].contiguous()
                digest.update(name.encode() + weight.view(torch.uint8).numpy().tobytes())
    except AlignerError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(2)
    print(digest.hexdigest())
