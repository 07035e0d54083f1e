"""`examples/train_gpt_ppo.py` that ends itself by SIGKILL while a call of a policy worker runs.

``ALIGNER_TEST_DIE_IN="2 train"``: in step 2, once the method ``train`` was called.
"""

import os
import runpy
import signal

from recipes import ROOT

from aligner.distributed.worker_groups import RayWorkerGroup
from aligner.errors import current_step

STEP, METHOD = os.environ["ALIGNER_TEST_DIE_IN"].split()
real_call, seen = RayWorkerGroup._start_call, [0]


def call(group, method_name, *arguments):
    answer = real_call(group, method_name, *arguments)
    seen.append(current_step() or seen[-1])  # a state is saved after its step
    if (group.name_prefix, method_name, seen[-1]) == ("lm_policy", METHOD, int(STEP)):
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


RayWorkerGroup._start_call = call
runpy.run_path(str(ROOT / "examples" / "train_gpt_ppo.py"), run_name="__main__")
