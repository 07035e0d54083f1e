"""The job files of examples/slurm are run, with stand-ins for Slurm, and what they start composes.

`srun` runs what it is given, once; `torchrun`, `python` and `ray` write down how they were called;
`torchrun --help` is the real one's, `ray status` counts the nodes that were started.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest
from recipes import ROOT, composed
from servers import bound_port

from aligner.config import load_config

JOBS = {path.stem: path for path in sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))}
NODES, GPUS = 2, 8
SCRIPT = "examples/train_gpt_ppo.py"

WRITE_DOWN = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if sys.argv[1:] == ["status"]:
    started = [line for line in open(os.environ["CALLS"]) if '"start"' in line]
    print("Active:", *(f" 1 node_{{number}}" for number in range(len(started))), sep="\\n")
"""
SHOW_HELP = f"""#!{sys.executable}
import os, sys
if sys.argv[1:] == ["--help"]:
    os.execv({sys.executable!r}, {[sys.executable, "-m", "torch.distributed.run", "--help"]!r})
"""
STAND_INS = {
    "torchrun": SHOW_HELP + WRITE_DOWN,
    "python": WRITE_DOWN,
    "ray": WRITE_DOWN,
    "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/sh\nprintf 'node-1\\nnode-2\\n'\n",
    "getent": "#!/bin/sh\necho 10.0.0.1 STREAM $2\n",
    "sleep": "#!/bin/sh\nexec /bin/sleep 0.02\n",
}


@pytest.fixture
def calls(tmp_path):
    """Runs a job file in a directory without .venv; how each stand-in was called."""
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(job, *arguments, nodes=NODES, code=0):
        log = tmp_path / "calls"
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.defpath}",
            "CALLS": str(log),
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": str(nodes),
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "SLURM_GPUS_ON_NODE": str(GPUS),
            "JOIN_ATTEMPTS": "20" if code == 0 else "3",
        }
        command, options = ["bash", str(JOBS[job]), *arguments], {"cwd": tmp_path, "timeout": 60}
        options |= {"env": environment, "capture_output": True, "text": True, "check": False}
        done = subprocess.run(command, **options)
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


@pytest.mark.parametrize("job", JOBS)
def test_a_job_starts_a_run_that_composes(job, calls):
    (run,) = [call for call in calls(job, "seed=5", "trainer.ppo.max_steps=3") if SCRIPT in call]
    option, name, *overrides = run[run.index(SCRIPT) + 1 :]
    assert option == "--config-name"
    config = load_config(composed(name.removeprefix("recipes/"), *overrides))
    assert (config.trainer.num_nodes, config.trainer.devices) == (NODES, GPUS)
    assert (config.seed, config.trainer.ppo.max_steps) == (5, 3)  # the last word is the user's
    assert config.cluster.engine == ("ray" if job == "ray" else "local")
    text = JOBS[job].read_text()
    limit = re.search(r"^#SBATCH --time=(\d+):00:00$", text, re.MULTILINE)[1]
    assert config.trainer.max_seconds < int(limit) * 3600
    commands = text[re.search(r"^[^#\n]", text, re.MULTILINE).start() :]
    assert "#SBATCH" not in commands  # Slurm reads no option behind a command


@pytest.mark.parametrize("job", ["torchrun", "container"])
def test_torchrun_knows_every_option_it_is_given(job, calls):
    from torch.distributed.run import parse_args

    (run,) = calls(job)
    options = parse_args(run[1:])
    assert (options.nnodes, options.nproc_per_node) == (str(NODES), str(GPUS))
    assert (options.rdzv_endpoint, options.rdzv_id) == ("node-1:29500", "7")
    assert getattr(options, "shutdown_timeout", 300) == 300  # torch 2.11 has no such option


def test_ray_gets_a_head_and_workers_that_know_its_options(calls):
    from ray.scripts.scripts import start

    seen = calls("ray")
    starts = [call for call in seen if call[:2] == ["ray", "start"]]
    head, worker = sorted(starts, key=lambda call: "--head" not in call)
    for call in (head, worker):
        start.make_context("ray start", call[2:])  # refuses what it does not know
        assert f"--num-gpus={GPUS}" in call
        assert "--block" in call
    assert {"--port=6379", "--node-ip-address=10.0.0.1"} <= set(head)
    assert "--address=10.0.0.1:6379" in worker
    assert SCRIPT in seen[-1]  # when all have joined


def test_a_cluster_that_stays_short_of_nodes_ends_the_job(calls):
    assert not any(SCRIPT in call for call in calls("ray", nodes=3, code=1))


TASK = """
import os, sys
import torch.distributed as dist
from aligner.config import TrainerConfig
from aligner.parallel.launch import started_processes
with started_processes(TrainerConfig(devices=2), 60.0):
    print(os.environ.get("LOCAL_RANK", "0"), dist.get_rank(), dist.get_world_size())
"""


@pytest.mark.extended
def test_tasks_of_srun_know_which_device_is_theirs():
    """Two tasks that Slurm started, without torchrun: on GPUs each takes that of its LOCAL_RANK."""
    job = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2"}
    job |= {"NODELIST": "localhost", "NODEID": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    with bound_port() as port, ExitStack() as ending:
        tasks = []
        for number in range(2):
            slurm = {**job, "PROCID": str(number), "LOCALID": str(number)}
            variables = {f"SLURM_{name}": value for name, value in slurm.items()}
            variables |= {**environment, "MASTER_PORT": str(port)}
            options = {"env": variables, "stdout": subprocess.PIPE, "text": True}
            tasks.append(subprocess.Popen([sys.executable, "-c", TASK], **options))
            ending.callback(tasks[-1].kill)
        seen = [process.communicate(timeout=120)[0].splitlines()[-1] for process in tasks]
    assert seen == ["0 0 2", "1 1 2"]
