"""A rank that dies makes the others stop with its name, soon; nobody stops without a reason."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import run_script, start_script
from servers import bound_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("rank_death_worker.py")
LIMIT_S = 20.0  # from the death to the end of the last process


@pytest.fixture
def port():
    with bound_port() as number:
        yield number


def start(case, port, folder):
    """Two ranks as a launcher without a store of its own starts them: rank 0 holds it."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start_script(WORKER, [case], folder / f"{rank}", {**common, "RANK": f"{rank}"})
        for rank in range(2)
    ]


def finish(ranks, first, folder):
    """Wait for rank ``first``, then for the other; exit codes, texts, seconds in between."""
    try:
        ranks[first].join(120)
        died = time.monotonic()
        ranks[1 - first].join(120)
        texts = [(folder / f"{rank}").read_text() for rank in range(2)]
        return [rank.exitcode for rank in ranks], texts, time.monotonic() - died
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["killed, others stuck", "host killed"])
def test_a_killed_rank_is_named(case, port, tmp_path):
    dying = 0 if case == "host killed" else 1
    codes, texts, seconds = finish(start(case, port, tmp_path), dying, tmp_path)
    assert codes[dying] == -9
    assert codes[1 - dying] == 1
    assert seconds < LIMIT_S
    pattern = rf"rank {1 - dying} stops: rank {dying} \(data {dying}, .*host .*, pid \d+\) died: "
    assert re.search(pattern, texts[1 - dying])


@pytest.mark.timeout(300)
def test_what_a_rank_raised_is_told_by_the_others(port, tmp_path):
    codes, texts, seconds = finish(start("raised", port, tmp_path), 1, tmp_path)
    assert codes == [1, 1]
    assert seconds < LIMIT_S
    assert "ValueError: the reward of sample 7 is a banana" in texts[1]
    assert re.search(r"rank 0 stops: rank 1 \(.*\) raised ValueError: .*banana", texts[0])
    assert "WorkerError" in texts[0]  # the main thread unwound, with the cause
    assert "rank 1 stops" not in texts[1]
    assert all("the watch is alive" not in text for text in texts)


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_slow_step_is_no_death_and_a_clean_end_is_clean(port, tmp_path):
    codes, texts, _ = finish(start("slow", port, tmp_path), 0, tmp_path)
    assert codes == [0, 0], texts
    assert all("stops" not in text for text in texts)
    assert all("the watch is alive" not in text for text in texts)


@pytest.mark.timeout(300)
def test_under_torchrun_the_survivor_names_the_dead(tmp_path):
    finished = run_script(
        *("torch.distributed.run", "--standalone", "--nproc-per-node", 2, WORKER, "killed"),
        folder=tmp_path,
        environment={"PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 1
    assert re.search(r"rank 0 stops: rank 1 \(.*\) died: its process is gone", finished.stderr)


def ranks_started_by(pid):
    """Further ranks among the children of a process, which also runs `ldconfig` as it imports."""
    ranks = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "LOCAL_RANK" in child.environ():  # as it is from exec on
                ranks.append(child)
    return ranks


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_process_whose_starter_is_ended_before_they_meet_ends_too(tmp_path):
    """SIGTERM to the first process alone, as soon as it has started the second."""
    inherited = {key: value for key, value in os.environ.items() if "TORCHELASTIC" not in key}
    log = tmp_path / "log"
    with log.open("wb") as stream:
        first = subprocess.Popen(
            [sys.executable, str(WORKER), "starts"],
            env={**inherited, "PYTHONPATH": str(ROOT)},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    while not (others := ranks_started_by(first.pid)):
        assert first.poll() is None, log.read_text()
        time.sleep(0.02)
    first.terminate()
    assert first.wait(60) == -signal.SIGTERM
    _, left = psutil.wait_procs(others, timeout=60)  # imports first
    for process in left:
        process.kill()
    assert not left
    assert f"the process that started it (pid {first.pid}) is gone" in log.read_text()
    assert "met" not in log.read_text()
