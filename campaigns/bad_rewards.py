"""Reward functions that misbehave: refused by name in time, with nothing left over."""

import json

from campaigns.harness import PPO, Campaign, run

# What a function does, and whether the run may go on with it.
_BODIES = {
    "raises": "raise KeyError('x')",
    "raises_base": "raise BaseException('x')",
    "keyboard": "raise KeyboardInterrupt",
    "generator_exit": "raise GeneratorExit",
    "stop_iteration": "raise StopIteration",
    "sys_exit": "sys.exit(0)",
    "os_exit": "os._exit(0)",
    "segfault": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "kill_group": "os.killpg(0, 9)",
    "hang": "time.sleep(1000)",
    "hang_c": "ctypes.CDLL(None).pause()",
    "busy": "\n    while True: pass",
    "gil_hang": "ctypes.PyDLL(None).sleep(1000)",
    "ignore_term": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
    "nan": "return [float('nan')] * n",
    "inf": "return [float('inf')] * n",
    "huge_float": "return [1e300] * n",
    "float32_edge": "return [3.5e38] * n",
    "neg_huge": "return [-1e39] * n",
    "huge_int": "return [10**400] * n",
    "denormal": "return [1e-320] * n",
    "none": "return None",
    "strings": "return ['1'] * n",
    "long_strings": "return ['1' * 5_000_000] * n",
    "too_few": "return [1.0]",
    "too_many": "return [1.0] * (n + 1)",
    "nested": "return [[1.0]] * n",
    "generator": "return (1.0 for _ in range(n))",
    "numpy2d": "import numpy as np; return np.ones((n, 1))",
    "complex": "return [1j] * n",
    "extra_nan": "return [{'reward': 1.0, 'x': float('nan')}] * n",
    "keys_differ": "return [{'reward': 1.0, str(i): 1.0} for i in range(n)]",
    "int_key": "return [{'reward': 1.0, 5: 1.0}] * n",
    "none_key": "return [{'reward': 1.0, None: 1.0, 'a': 1.0}] * n",
    "path_key": "return [{'reward': 1.0, '../x\\n': 1.0}] * n",
    "thousand_keys": "return [{'reward': 1.0, **{f'k{i}': 1.0 for i in range(1000)}}] * n",
    "prints_much": "print('x' * 20_000_000); return [1.0] * n",
    "close_fds": "os.closerange(0, 100); return [1.0] * n",
    "writes_everywhere": "\n    for fd in range(3, 400):\n        try: os.write(fd, b'\\0\\0\\0\\5"
    "junk!')\n        except OSError: pass\n    return [1.0] * n",
    "fork_child": "\n    if os.fork() == 0: time.sleep(1000)\n    return [1.0] * n",
    "fork_daemon": "\n    if os.fork() == 0: os.setsid(); time.sleep(100); os._exit(0)\n"
    "    return [1.0] * n",
    "fork_returns": "os.fork(); return [1.0] * n",
    "grandchild_hang": "subprocess.Popen(['sleep', '100'], start_new_session=True); "
    "time.sleep(1000)",
    "raises_huge": "raise ValueError('z' * 50_000_000)",
    "raises_strange": "raise Strange()",
    "raises_surrogate": "raise ValueError('\\ud800 \\x00')",
    "slow_culprit": "\n    if n > 1: raise ValueError('batch')\n    time.sleep(1000)",
    "recursion": "return again()",
    "reads_stdin": "input(); return [1.0] * n",
    "changes_directory": "os.chdir('/'); return [1.0] * n",
    "empties_lists": "prompts.clear(); responses.clear(); return [1.0] * n",
}
_HEAD = """import ctypes, os, signal, subprocess, sys, time
class Strange(Exception):
    def __str__(self): raise RuntimeError('no text')
def again(): return again()
def reward(prompts, responses, ground_truths, **columns):
    n = len(prompts)
    """
_MOST_OUTPUT = 100_000


def run_campaign(campaign: Campaign) -> None:
    """Run one step with each reward, with a limit of three seconds."""
    for name, body in campaign.while_time(sorted(_BODIES.items())):
        file, folder = campaign.folder / f"{name}.py", campaign.fresh(name)
        file.write_text(_HEAD + body + "\n")
        outcome = run(
            campaign,
            "train_gpt_ppo",
            [
                *(*PPO, f"reward.function={file}:reward", "~reward.kwargs.pattern"),
                *("reward.time_limit_s=3", f"exp_manager.explicit_log_dir={folder}"),
            ],
            timeout_s=60,
        )
        good, note = outcome.is_clean, f"{outcome.verdict}: {outcome.last}"
        if outcome.verdict == "ok":
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            rewards = [json.loads(line).get("train_rollouts/rewards") for line in lines]
            good = all(isinstance(reward, float | int | None) for reward in rewards)
            note = f"ok: rewards {rewards}"
        elif len(outcome.output) > _MOST_OUTPUT and name != "prints_much":
            good, note = False, f"{len(outcome.output)} characters of output"
        campaign.record(name, good, note)
