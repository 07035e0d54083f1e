"""Imported by every Python that starts with this folder on its path; see `test_driver`.

The process that calls a policy worker by ``$ALIGNER_TEST_DIE_IN`` in step 2 ends at once.
"""

import os
import signal
import sys
from importlib.abc import MetaPathFinder


class _Watch(MetaPathFinder):
    """Changes the group of workers as soon as somebody imports what uses it."""

    def find_spec(self, name, path=None, target=None):
        if name == "aligner.distributed.virtual_cluster":
            sys.meta_path.remove(self)
            _change()


def _change():
    from aligner.distributed.ray_worker_group import RayWorkerGroup
    from aligner.observe.nonfinite import current_step

    real_call, method, saves = RayWorkerGroup._call, os.environ["ALIGNER_TEST_DIE_IN"], []

    def call(group, rank, method_name, *arguments):
        answer = real_call(group, rank, method_name, *arguments)
        if (group.name_prefix, method_name) == ("lm_policy", method):
            saves.append(method_name == "save_state")  # made after its step
            if current_step() == 2 or sum(saves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return answer

    RayWorkerGroup._call = call


if "ALIGNER_TEST_DIE_IN" in os.environ:
    sys.meta_path.insert(0, _Watch())
