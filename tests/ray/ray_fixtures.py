"""The Ray that tests share, and nothing of it left after any of them."""

import os
from pathlib import Path

import pytest
from leftovers import living_actors, processes_of, reserved_groups, session_folder, shared_memory


@pytest.fixture(scope="session")
def own_ray():
    """A Ray of four CPUs, started as a run starts it; gone with all its processes afterwards."""
    import ray

    from aligner.distributed.ray.session import ray_session

    memory = shared_memory()
    with ray_session(None, cpus=4, object_store_mb=128):
        folder = session_folder(os.getpid())
        assert processes_of(folder)
        yield ray
    assert processes_of(folder) == []
    assert not Path(folder).exists()
    assert shared_memory() <= memory


@pytest.fixture
def ray(own_ray):
    """The Ray of all tests; no actor and no placement group may outlive the test."""
    yield own_ray
    assert living_actors() == []
    assert reserved_groups() == []
