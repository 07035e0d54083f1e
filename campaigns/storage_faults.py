"""Run states and records that were damaged, full disks, several runs in one directory.

Whatever was damaged, the run ends as one that was left alone, or it is refused with everything that
it had still there.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from campaigns.harness import PPO, Campaign, Outcome, Run, learned, run

_SETTINGS = (
    *("data.validation.arguments.size=8", "trainer.ppo.max_steps=6", "trainer.ppo.save_interval=1"),
    *("trainer.ppo.val_check_interval=2", "exp_manager.save_top_k=2"),
)
_POLICY = "policy/rank_00000.pt"
Damage = Callable[[Path], Any]


def run_campaign(campaign: Campaign) -> None:
    """Damage the directory of a run of four steps, and resume for six steps."""
    alone, half = campaign.fresh("alone"), campaign.fresh("half")
    _go(campaign, alone)
    _go(campaign, half, "trainer.ppo.max_steps=4")
    expected = learned(alone)
    cases: list[tuple[str, Damage | int]] = [*_damages(campaign), *_disks(half)]
    for name, case in campaign.while_time(cases):
        if isinstance(case, int):
            _full_disk(campaign, name, case, expected)
            continue
        folder = campaign.fresh("damaged")
        shutil.copytree(half, folder)
        case(folder)
        files_before = _files(folder)
        outcome = _go(campaign, folder)
        if outcome.verdict == "ok":
            equal = [x == y for x, y in zip(expected, learned(folder), strict=True)]
            # What was taken from the records themselves cannot be restored: then the weights count.
            good = all(equal) if "records" not in name else equal[2]
            campaign.record(name, good, f"ok; metrics, samples, weights the same: {equal}")
        else:
            lost = sorted(
                path for path, size in files_before.items() if _files(folder).get(path, -1) < size
            )
            note = f"{outcome.verdict}; smaller or gone {lost[:3]}: {outcome.last}"
            campaign.record(name, outcome.verdict == "refused" and not lost, note)
    _at_once(campaign, expected)


def _go(campaign: Campaign, folder: Path, *settings: str) -> Outcome:
    log_dir = f"exp_manager.explicit_log_dir={folder}"
    return run(campaign, "train_gpt_ppo", [*PPO, *_SETTINGS, log_dir, *settings], timeout_s=120)


def _files(folder: Path) -> dict[str, int]:
    """Return the sizes of a run's own files."""
    stored_files = [*folder.glob("*.jsonl"), *folder.glob("run_state/step_*/*/*.pt")]
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in stored_files
        if path.is_file()
    }


def _newest(folder: Path) -> Path:
    return sorted((folder / "run_state").glob("step_*"))[-1]


def _damages(campaign: Campaign) -> Iterator[tuple[str, Damage]]:
    def flip(name: str, count: int) -> Damage:
        def damage(folder: Path) -> None:
            path = _newest(folder) / name
            data = bytearray(path.read_bytes())
            for _ in range(count):
                data[campaign.rng.randrange(len(data))] ^= 1 << campaign.rng.randrange(8)
            path.write_bytes(data)

        return damage

    def rewrite(name: str, content: Callable[[bytes], bytes]) -> Damage:
        def damage(folder: Path) -> None:
            path = _newest(folder) / name
            path.write_bytes(content(path.read_bytes()))

        return damage

    def manifest(**changes: Any) -> Damage:
        return rewrite(
            "manifest.json", lambda data: json.dumps({**json.loads(data), **changes}).encode()
        )

    def record(name: str, content: Callable[[bytes], bytes]) -> Damage:
        def damage(folder: Path) -> None:
            path = folder / name
            path.write_bytes(content(path.read_bytes()))

        return damage

    def every(name: str, action: Callable[[Path], object]) -> Damage:
        return lambda folder: [action(path) for path in folder.glob(f"run_state/*/{name}")]

    yield "nothing", lambda folder: None
    for count in (1, 8, 1000):
        yield f"{count} bits of the policy", flip(_POLICY, count)
    yield "100 bits of the critic", flip("value/rank_00000.pt", 100)
    yield "1 bit of rng.pt", flip("rng.pt", 1)
    yield "1 bit of state.json", flip("state.json", 1)
    yield "policy cut", rewrite(_POLICY, lambda data: data[:1000])
    yield "policy all zeros", rewrite(_POLICY, lambda data: bytes(len(data)))
    yield "state.json junk", rewrite("state.json", lambda data: b"x" * len(data))
    yield "policy deleted", lambda folder: (_newest(folder) / _POLICY).unlink()
    yield "manifest deleted", lambda folder: (_newest(folder) / "manifest.json").unlink()
    yield "manifest junk", rewrite("manifest.json", lambda data: b"{")
    yield "manifest a list", rewrite("manifest.json", lambda data: b"[]")
    yield "manifest of step 10**9", manifest(step=10**9)
    yield "manifest of step x", manifest(step="x")
    yield "manifest of format 99", manifest(format=99)
    yield "all manifests deleted", every("manifest.json", Path.unlink)
    yield "all policies cut", every(_POLICY, lambda path: os.truncate(path, 10))
    yield "all states deleted", lambda folder: shutil.rmtree(folder / "run_state")
    yield "half a last line of the records", record("metrics.jsonl", lambda data: data + b'{"st')
    yield (
        "a broken line inside the records",
        record("metrics.jsonl", lambda data: data.replace(b"\n", b"\n{broken\n", 1)),
    )
    yield "records of metrics deleted", lambda folder: (folder / "metrics.jsonl").unlink()
    yield (
        "a later line in the records",
        record("metrics.jsonl", lambda data: data + b'{"step": 99}\n'),
    )
    yield "renamed state", lambda folder: _newest(folder).rename(folder / "run_state/step_999999")
    yield "stray folder", lambda folder: (folder / "run_state/.tmp-step_000005").mkdir()
    yield "a file for a step", lambda folder: (folder / "run_state/step_000009").write_text("x")


def _disks(half: Path) -> list[tuple[str, int]]:
    """Return sizes in KiB of disks that are too small, if this user may mount a disk."""
    if os.geteuid() != 0:
        return []
    state_kb = (
        sum(path.stat().st_size for path in _newest(half).rglob("*") if path.is_file()) // 1024
    )
    sizes = (8, 40, 200, 900, *(n * state_kb + 100 for n in (1, 2, 3)), 4 * state_kb + 200)
    return [(f"disk of {size} KiB", size) for size in sizes]


@contextmanager
def _mounted(folder: Path, kib: int) -> Iterator[bool]:
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def _full_disk(campaign: Campaign, name: str, kib: int, expected: Any) -> None:
    with _mounted(campaign.folder / "disk", kib) as mounted:
        if not mounted:
            campaign.left_out.append(f"{name} (mounting is not allowed here)")
            return
        folder = campaign.folder / "disk" / "run"
        first = _go(campaign, folder)
        words = ["mount", "-o", f"remount,size={100 * 1024}k", str(folder.parent)]
        subprocess.run(words, check=True)
        second = _go(campaign, folder)
        equal = second.status == 0 and list(learned(folder)) == list(expected)
        note = f"{first.verdict}: {first.last}; with room {second.verdict}, the same: {equal}"
        campaign.record(name, first.is_clean and equal, note)


def _at_once(campaign: Campaign, expected: Any) -> None:
    """Start three runs in one directory: one learns, the others wait or are refused."""
    folder = campaign.fresh("at_once")
    arguments = [*PPO, *_SETTINGS, f"exp_manager.explicit_log_dir={folder}"]
    logs = [campaign.folder / f"at_once_{number}.log" for number in range(3)]
    runs = [Run("train_gpt_ppo", arguments, log=log) for log in logs]
    outcomes = [process.finish(120) for process in runs]
    verdicts = sorted(outcome.verdict for outcome in outcomes)
    equal = list(learned(folder)) == list(expected)
    good = verdicts[0] == "ok" and all(outcome.is_clean for outcome in outcomes) and equal
    campaign.record("three runs at once", good, f"{verdicts}, the same: {equal}")
