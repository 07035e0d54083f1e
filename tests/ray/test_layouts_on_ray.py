"""Four workers, in groups of their own, on one node and on two, against the local engine.

Two data-parallel workers give the local engine's numbers at two processes to the bit, and those of
one process within 1e-4: sums over ranks are rounded in another order.
"""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from leftovers import processes_of, wait_for
from recipes import numbers
from runs import ON_RAY, finished, go_back_to, largest_difference, result, start, train

pytestmark = [pytest.mark.ray, pytest.mark.ray_heavy, pytest.mark.timeout(1800)]
# Nodes and driver must agree on one; a Ray that a run starts sees to it itself.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
SEPARATE = [ON_RAY, "cluster.colocated=false"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, tiny_nemo):
    return train(tmp_path_factory.mktemp("one") / "run", tiny_nemo)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, tiny_nemo):
    folder = tmp_path_factory.mktemp("two") / "run"
    finished(start(folder, tiny_nemo, "trainer.devices=2"))
    return result(folder)


TWO, SPLIT = "trainer.devices=2", "critic.tensor_model_parallel_size=2"
LAYOUTS = {
    "two workers each": [*SEPARATE, TWO],
    "one critic": [*SEPARATE, TWO, "cluster.value_workers=1"],
    "tensor parallel": [ON_RAY, TWO, "model.tensor_model_parallel_size=2"],
    # Two data-parallel policy workers, and a critic in two halves.
    "critic apart, split": [*SEPARATE, TWO, SPLIT],
    "critic split": [ON_RAY, TWO, SPLIT],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_numbers_of_one_process(
    tmp_path, tiny_nemo, one_process, request, ray, layout
):
    options = LAYOUTS[layout]
    ended = train(tmp_path / "run", tiny_nemo, *options)
    assert largest_difference(ended[0], one_process[0]) < 1e-4
    if layout == "two workers each":
        assert ended == request.getfixturevalue("two_processes")
    if layout == "critic split":  # its halves go on in the policy's layout
        go_back_to(1, tmp_path / "run", tmp_path / "again")
        resumed = train(tmp_path / "again", tiny_nemo, *options[:-1])
        assert largest_difference(resumed[0], ended[0]) < 1e-4


@pytest.fixture
def two_nodes(tmp_path):
    """Address of a cluster of two nodes with two CPUs each: two raylets on this machine."""
    folder = f"/tmp/aligner-nodes-{os.getpid()}"
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2"]
    memory = f"--object-store-memory={128 * 2**20}"
    head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}"]
    head += ["--node-ip-address=127.0.0.1"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **TOKEN}
    nodes = []
    try:
        nodes.append(_start_node([*ray, memory, *head], environment, tmp_path / "head"))
        address = re.search(r"--address='([^']+)'", (tmp_path / "head").read_text())[1]
        second = [*ray, memory, f"--address={address}"]
        nodes.append(_start_node(second, environment, tmp_path / "second"))
        yield address
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(60)
        wait_for(lambda: not processes_of(folder), 60, "the nodes' processes end")
        subprocess.run(["rm", "-rf", folder], check=True)


def _start_node(command, environment, log):
    """Tried again where Ray gives up: it allows 30 s, which a crowded machine may exceed."""
    for _ in range(3):
        with log.open("w") as output:
            node = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        wait_for(lambda: _has_started(log) or node.poll() is not None, 300, str(log))  # noqa: B023
        if node.poll() is None:
            return node
    raise AssertionError(log.read_text())


def _has_started(log):
    return "Ray runtime started" in log.read_text()


def test_two_nodes_on_one_machine(tmp_path, tiny_nemo, two_processes, two_nodes):
    """Each role has a worker on each node; found by RAY_ADDRESS."""
    folder = tmp_path / "run"
    environment = {**os.environ, **TOKEN, "RAY_ADDRESS": two_nodes}
    layout = ["trainer.devices=1", "trainer.num_nodes=2"]
    finished(start(folder, tiny_nemo, *SEPARATE, *layout, environment=environment))
    assert numbers(folder) == two_processes[0]
    assert result(folder) == two_processes
