"""Large tensors on the CPU out of pages that freed ones left (`aligner/device/pages.cpp`).

An allocator is a process's own, so each case is a process.
"""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.integration

BEGIN = """
    import ctypes, gc, os, random, signal, threading
    import torch
    from aligner.device import host_memory, native
    torch.set_num_threads(1)
    MB = 2**18  # float32 numbers
    reason = host_memory.reuse_pages()
"""
SERVED = """
    assert reason is None, reason
    path = native.compiled(host_memory.Path(host_memory.__file__).with_name("pages.cpp"))
    held = ctypes.CDLL(str(path)).held_bytes
    held.restype = ctypes.c_int64
"""


def run(code, **environment):
    command = [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(code)]
    env = {**os.environ, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def run_served():
    """Run code in a process whose large tensors are the allocator's."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("the allocator is compiled: needs g++ or clang++")
    return lambda code: run(SERVED + code)


def test_kept_tensors_beside_temporary_ones_take_no_more_than_they_are(run_served):
    run_served("""
    torch.ones(MB - 1)
    assert held() == 0  # smaller ones are the C library's
    before, kept = host_memory.resident_bytes(), []
    for _ in range(30):
        for _ in range(4):
            temporary = torch.ones(8 * MB)
        kept.append(temporary * 2)
    grown = (host_memory.resident_bytes() - before) / 2**20
    assert grown < 30 * 8 + 2 * 8 + 64, grown
    assert 30 * 8 * 2**20 <= held() <= (30 * 8 + 2 * 8 + 64) * 2**20
    assert held() % 2**26 == 0  # taken in regions, not tensor by tensor
    """)


def test_ranges_that_touch_become_one(run_served):
    run_served("""
    first, second = torch.empty(20 * MB), torch.empty(20 * MB)
    assert held() == 64 * 2**20
    del first  # by itself
    del second  # between the first and what is left of the region
    whole = torch.empty(64 * MB)
    assert held() == 64 * 2**20, held()
    """)


def test_no_two_tensors_share_a_byte_whatever_the_order(run_served):
    run_served("""
    def work(seed):
        order, alive = random.Random(seed), {}
        for number in range(1, 400):
            size = order.choice([10, MB - 1, MB, MB + 1, 3 * MB, 20 * MB, order.randrange(40 * MB)])
            alive[number] = torch.full((size,), float(number + 1000 * seed))
            while len(alive) > 6:
                key = order.choice(list(alive))
                gone = alive.pop(key)
                if gone.numel():
                    assert gone.min() == gone.max() == key + 1000 * seed, (seed, key)
        for key, tensor in alive.items():
            assert (tensor == key + 1000 * seed).all()

    failures = []
    def guarded(seed):
        try:
            work(seed)
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in (1, 2, 3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures
    most = held()
    for _ in range(3):
        work(1)
    assert held() <= most  # what is free serves again
    """)


def test_a_process_that_is_forked_while_another_thread_allocates(run_served):
    run_served("""
    begun, stop = threading.Event(), threading.Event()

    def allocate():
        while not stop.is_set():
            torch.empty(2 * MB)
            begun.set()

    torch.empty(2 * MB)
    thread = threading.Thread(target=allocate)
    thread.start()
    begun.wait()  # what PyTorch itself makes once is made
    ends = []
    for _ in range(40):
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # where it inherited a lock that nobody opens
            torch.empty(2 * MB)
            os._exit(0)
        ends.append(os.waitpid(child, 0)[1])
    stop.set()
    thread.join()
    assert not any(ends), ends
    """)


def test_a_forked_process_and_one_without_memory(run_served):
    run_served("""
    tensor = torch.ones(4 * MB)
    child = os.fork()
    if child == 0:
        os._exit(0 if (torch.ones(8 * MB) + 1).sum() == 16 * MB and tensor.sum() == 4 * MB else 1)
    assert os.waitpid(child, 0)[1] == 0
    try:
        torch.empty(2**52)
    except RuntimeError as error:
        assert "can't allocate memory" in str(error)
    else:
        raise AssertionError("16 PiB were given out")
    from aligner.device import accelerator
    accelerator.prepare_megatron()  # asks again, to no effect
    assert torch.ones(2 * MB).sum() == 2 * MB
    """)


def test_without_a_compiler_memory_is_the_c_library_s(tmp_path):
    out = run(
        """
    print(reason)
    assert torch.ones(4 * MB).sum() == 4 * MB
    """,
        PATH=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
        CXX="no-compiler",
    )
    assert "no C++ compiler" in out
    assert "g++" in out
