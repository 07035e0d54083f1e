"""Imported by every Python that starts with this folder on its path; see `test_kills`.

``ALIGNER_TEST_DIE_IN="2 train"``: the process that calls a policy worker so in step 2 ends there.
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
    from aligner.distributed.worker_groups import RayWorkerGroup
    from aligner.errors import current_step

    step, method = os.environ["ALIGNER_TEST_DIE_IN"].split()
    real_call, seen = RayWorkerGroup._start_call, [0]

    def call(group, method_name, *arguments):
        answer = real_call(group, method_name, *arguments)
        seen.append(current_step() or seen[-1])  # a state is saved after its step
        called = (group.name_prefix, method_name, seen[-1])
        if called == ("lm_policy", method, int(step)):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    RayWorkerGroup._start_call = call


if "ALIGNER_TEST_DIE_IN" in os.environ:
    sys.meta_path.insert(0, _Watch())
