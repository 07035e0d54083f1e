"""Run the campaigns: seeded, bounded in time, one summary line each, non-zero where one fails.

    python -m campaigns --seed 1 --minutes 2 [--out FOLDER] [NAMES]

``--minutes`` is the time of each campaign: it starts no case after that.
"""

import argparse
import importlib
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from campaigns.harness import TINY, Campaign

NAMES = (
    *("config_fuzz", "bad_data", "bad_checkpoints", "state_pickles", "bad_rewards"),
    *("environments", "hostile_values", "flipped_bits", "sandbox_folders", "serve_inputs"),
    *("changed_resume", "nonsense_runs", "storage_faults", "kill_resume"),
    *("reward_server", "ranks", "ray_kill"),
)


def main() -> int:
    """Run the command line and return 1 if a campaign failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=2.0, help="of each campaign")
    parser.add_argument("--out", type=Path, help="kept; default: a temporary folder")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    if not TINY.exists():
        parser.error(f"{TINY} is missing; make it with: make models/tiny.nemo")
    # Not TemporaryDirectory: the forked children would remove it as they end.
    out = (options.out or Path(tempfile.mkdtemp(prefix="campaigns-"))).resolve()
    try:
        passed = [_run(name, options.seed, options.minutes, out) for name in options.names or NAMES]
    finally:
        if options.out is None:
            shutil.rmtree(out, ignore_errors=True)
    print(f"\nseed {options.seed}, {options.minutes:g} minutes each")
    for campaign in passed:
        print(campaign.summary())
    return int(any(campaign.failures for campaign in passed))


def _run(name: str, seed: int, minutes: float, out: Path) -> Campaign:
    print(f"\n{name}", flush=True)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(name, seed, minutes, folder)
    try:
        importlib.import_module(f"campaigns.{name}").run_campaign(campaign)
    except Exception as error:
        traceback.print_exc()
        campaign.record("the campaign itself", False, f"{type(error).__name__}: {error}")
    campaign.end()
    return campaign


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it started, too
    sys.exit(main())
