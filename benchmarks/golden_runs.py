"""Metrics and weights of short seeded runs, compared between two versions of the library.

    python -m benchmarks.golden_runs --write golden.json      # before a change
    python -m benchmarks.golden_runs --compare golden.json    # after the change

Each case runs a tiny recipe for two or three steps in one process on the CPU. The record of a case
contains its metrics, except those that measure time or memory, and a hash of each tensor of the
last run state. `--compare` prints what differs and exits with status 1 if anything does. Needs
`models/tiny.nemo` (make models/tiny.nemo).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

SKIPPED = ("timers/", "memory/", "progress/tokens_per", "throughput")
REINFORCE = "train_gpt_reinforce.py --config-name recipes/grpo_tiny_cpu trainer.ppo.max_steps=3"
PPO = "train_gpt_ppo.py --config-name recipes/ppo_tiny_cpu trainer.ppo.max_steps=3"
GAME = "train_gpt_ppo.py --config-name recipes/ppo_tiny_guessing_cpu trainer.ppo.max_steps=2"
# An agent of two turns, and another conversation between them.
AGENT = """
import httpx

def run(*, base_url, api_key, seed, prompt, **columns):
    policy = httpx.Client(
        base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=600
    )

    def ask(messages):
        answer = policy.post("/chat/completions", json={"messages": messages}).raise_for_status()
        return answer.json()["choices"][0]["message"]

    messages = [{"role": "user", "content": prompt}]
    messages += [ask(messages), {"role": "user", "content": "Again."}]
    other = ask([{"role": "user", "content": "Another question."}])
    policy.post("/reward", json={"reward": len(other["content"]) % 3})
    return float(len(ask(messages)["content"]) % 5)
"""
CASES = {
    "ppo": PPO,
    "ppo_dtensor": f"{PPO} policy.backend=dtensor",
    "ppo_micro_batch": f"{PPO} model.micro_batch_size=8 model.sequence_packing.enabled=true",
    "ppo_lora": f"{PPO} model.peft.peft_scheme=lora",
    "ppo_sampling": f"{PPO} model.ppo.sampling_params.temperature=0.8"
    " model.ppo.sampling_params.top_k=20 model.ppo.sampling_params.top_p=0.9",
    "grpo": REINFORCE,
    "grpo_kl_in_loss": f"{REINFORCE} model.ppo.kl_loss.coef=0.01",
    "rloo": "train_gpt_reinforce.py --config-name recipes/rloo_tiny_cpu trainer.ppo.max_steps=3",
    "rs": "train_gpt_rs.py --config-name recipes/rs_tiny_cpu trainer.rs.max_steps=2",
    "game": GAME,
    "game_turns": f"{REINFORCE} reward=environment reward.function=null ~reward.kwargs.pattern"
    " environment.factory=aligner.environments.games:GuessingGame environment.kwargs.high=3"
    " +environment.kwargs.guesses=3 environment.max_turns=3 environment.max_tokens=128"
    " data.train.source=aligner.environments.games:guessing_games ~data.train.arguments.shots"
    " data.validation.source=aligner.environments.games:guessing_games"
    " ~data.validation.arguments.shots trainer.ppo.advantage.credit=turn",
    "agent": f"{PPO} reward=environment environment.kind=endpoint environment.max_tokens=250"
    " data.train.arguments.shots=0 data.validation.arguments.shots=0"
    " model.ppo.length_params.max_length=16 reward.function=null ~reward.kwargs.pattern"
    " environment.factory={agent}:run trainer.ppo.max_steps=2",
    "sft": "train_gpt_sft.py --config-name recipes/sft_tiny_cpu trainer.sft.max_steps=3",
    "dpo": "train_gpt_dpo.py --config-name recipes/dpo_tiny_cpu trainer.dpo.max_steps=3",
    "kto": "train_gpt_dpo.py --config-name recipes/kto_tiny_cpu trainer.dpo.max_steps=3",
    "reward": "train_gpt_reward.py --config-name recipes/reward_tiny_cpu"
    " trainer.reward_model.max_steps=3",
}


def record(case: str, folder: Path) -> dict[str, Any]:
    """Run ``case`` below ``folder``. Its metrics by step and the hashes of its last run state."""
    (agent := folder / "agent.py").write_text(AGENT)
    script, *options = CASES[case].replace("{agent}", str(agent)).split()
    log_dir = folder / "run"
    command = [sys.executable, f"examples/{script}", *options]
    command += [f"exp_manager.explicit_log_dir={log_dir}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if run.returncode:
        return {"error": (run.stdout + run.stderr)[-2000:]}
    lines = (log_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [
        {key: value for key, value in json.loads(line).items() if not key.startswith(SKIPPED)}
        for line in lines
    ]
    return {"metrics": metrics, "tensors": dict(_hashes(log_dir / "run_state"))}


def _hashes(folder: Path) -> Iterator[tuple[str, str]]:
    """Return name and hash of each tensor of the newest run state below ``folder``."""
    import torch

    if not (states := sorted(folder.glob("step_*"))):
        return
    for file in sorted(states[-1].rglob("rank_*.pt")):
        for name, value in _leaves(torch.load(file, weights_only=True), file.parent.name):
            if isinstance(value, torch.Tensor) and ".rng." not in name:
                data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                yield name, hashlib.sha256(data).hexdigest()[:16]


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(value, f"{name}.{key}")
    else:
        yield name, tree


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each value that differs between two records of a case."""
    old, new = (dict(_leaves(record, "")) for record in (expected, actual))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} -> {new.get(name)}"


def main() -> int:
    """Write or compare the records of the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    records = {}
    for case in options.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            records[case] = record(case, Path(folder))
        print(case, records[case].get("error", "ran"), flush=True)
    if options.write:
        options.write.write_text(json.dumps(records, indent=1))
    if not options.compare:
        return int(any("error" in record for record in records.values()))
    golden = json.loads(options.compare.read_text())
    changed = {case: list(differences(golden[case], records[case])) for case in records}
    for case, lines in changed.items():
        print(f"{case}: {len(lines)} differences", *lines[:8], sep="\n  ")
    return int(any(changed.values()))


if __name__ == "__main__":
    sys.exit(main())
