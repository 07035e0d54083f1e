"""Cases of `test_dry_rules`: what the dry device says of operations that a GPU refuses."""

import inspect
import os
import sys

import dry_roles
import torch

from aligner.checkpoint.background import CopyMemory
from aligner.config import LayerOptions
from aligner.device import accelerator
from aligner.errors import DryDeviceError
from aligner.models.gpt.layers import layer_spec
from aligner.models.gpt.megatron.build import transformer_config
from aligner_plan.dry.device import DryDevice
from aligner_plan.dry.known import tensors_in


def said(name, deterministic=False):
    """The error of a case by name; "" where there is none."""
    try:
        with DryDevice():
            torch.use_deterministic_algorithms(deterministic)
            CASES[name]()
    except DryDeviceError as error:
        return str(error)
    return ""


def locked_memory(refuses):
    with DryDevice() as device:
        device.refuses_locks = refuses
        memory = accelerator.copy_memory(4096)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        found = [device.order.is_locked(address)]
        torch.ones(2, device="cuda").add_(1)  # no error is left
        del memory
        return [*found, device.order.is_locked(address)]


def device_of_rank(number):
    """Devices of a second process's tensors: by the literal, and a model's in an update."""
    os.environ["LOCAL_RANK"] = str(number)
    with DryDevice():
        accelerator.activate()
        return [str(torch.ones(1, device="cuda").device), str(accelerator.device())]


def collectives(**case):
    """What each rank communicates in an update, scoring and a rollout, in order.

    By group: [name, bytes, reduction] of each collective.
    """
    found, reductions = [], []
    all_reduce = torch.distributed.all_reduce

    def reduce(tensor, op=torch.distributed.ReduceOp.SUM, *args, **kwargs):
        reductions.append(str(op))
        try:
            return all_reduce(tensor, op, *args, **kwargs)
        finally:
            reductions.pop()

    torch.distributed.all_reduce = reduce  # in a process of this case's own
    for rank in range(case["world"]):
        seen = {}
        with DryDevice(case["world"], rank) as device:
            plain = device.saw_collective

            def saw(packet, operands, ranks, is_async=False, seen=seen, plain=plain):
                tensors = [sum(t.nbytes for t in tensors_in(each)) for each in operands]
                if not packet.__name__.startswith(("send", "recv")):
                    name = "-".join(map(str, ranks))
                    what = [packet.__name__, max(tensors, default=0), *reductions]
                    seen.setdefault(name, []).append(what)
                plain(packet, operands, ranks, is_async)

            device.saw_collective = saw
            role, batch, passes = dry_roles.ready(case)
            role.prepare_for_training()
            role.training_update(batch, mbs=passes)
            role.finish_training()
            role.prepare_for_inference()
            dry_roles.score(role, case, batch, passes)
            if case["role"] == "actor" and case.get("pp", 1) == 1:
                dry_roles.rollout(role, batch)
        found.append(seen)
    return found


def te_spec():
    plain, calls = layer_spec.get_gpt_layer_with_transformer_engine_spec, []

    def spec(*args, **kwargs):
        inspect.signature(plain).bind(*args, **kwargs)
        calls.append(sorted(kwargs))
        raise LookupError

    class Extensions:
        TENorm = None

    sys.modules["megatron.core.extensions.transformer_engine"] = Extensions
    layer_spec.get_gpt_layer_with_transformer_engine_spec = spec
    layer_spec.uses_transformer_engine = lambda *_: True
    with DryDevice():
        try:
            layer_spec.block_spec(
                transformer_config(dry_roles.TINY_ARCHITECTURE), 1, None, LayerOptions()
            )
        except LookupError:
            return calls
    return []


def matrix(dtype=torch.bfloat16):
    return torch.ones(8, 8, device="cuda", dtype=dtype)


def captured(function):
    accelerator.capture(function, accelerator.graph_memory())()


def attention(dropout):
    rows = matrix().expand(1, 1, 8, 8)
    torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=dropout)


def on_the_device():
    return torch.ones(8, device="cuda")


def read_on_side(before=None, after=None):
    side, held = torch.cuda.Stream(), [on_the_device()]
    if before:
        before(side, held)
    with torch.cuda.stream(side):
        held[0].add(1)
    if after:
        after(side, held)


def wait_for_main(side, held):
    side.wait_stream(torch.cuda.current_stream())


def wait_for_event(side, held):
    side.wait_event(torch.cuda.current_stream().record_event())


def wait_for_an_earlier_event(side, held):
    done = torch.cuda.current_stream().record_event()
    held[0].mul_(2)
    side.wait_event(done)


def wait_on_the_host(side, held):
    torch.cuda.synchronize()


def overwrite(side, held):
    held[0].zero_()


def free(side, held):
    held.clear()
    on_the_device()


def record_and_free(side, held):
    held[0].record_stream(side)
    free(side, held)


def free_and_wait(side, held):
    held.clear()
    torch.cuda.current_stream().wait_stream(side)
    on_the_device()


def overwrite_source(pinned):
    source = torch.ones(8, pin_memory=pinned)
    accelerator.to_device(source)
    source.zero_()


CASES = {
    "product": lambda: matrix() @ matrix(torch.float32),
    "norm": lambda: torch.nn.functional.layer_norm(
        matrix(), (8,), matrix(torch.float32)[0], matrix(torch.float32)[0]
    ),
    "product with wide sums": lambda: torch.mm(
        torch.empty_like(matrix()), matrix(), out_dtype=torch.float32
    ),
    "wide matrix": lambda: matrix().double(),
    "wide vector": lambda: matrix()[0].double(),
    "sum of floats": lambda: matrix().cumsum(1),
    "sum of numbers": lambda: matrix().long().cumsum(1),
    "sum of numbers as floats": lambda: matrix().long().cumsum(1, dtype=torch.float32),
    "sum on the host": lambda: torch.ones(8).cumsum(0),
    "histogram": lambda: torch.histc(matrix(torch.float32), 4, 0, 4),
    "draw": lambda: torch.rand(8, device="cuda"),
    "captured draw": lambda: captured(lambda: torch.rand(8, device="cuda")),
    "captured draw in place": lambda: captured(matrix().exponential_),
    "captured dropout": lambda: captured(lambda: torch.nn.functional.dropout(matrix(), 0.5)),
    "captured attention": lambda: captured(lambda: attention(0.0)),
    "captured attention that drops": lambda: captured(lambda: attention(0.5)),
    "put": lambda: matrix().put_(matrix()[0].long(), matrix()[0]),
    # Streams, and copies that run beside the host.
    "read beside": read_on_side,
    "read after the stream": lambda: read_on_side(wait_for_main),
    "read after an event": lambda: read_on_side(wait_for_event),
    "read after an earlier event": lambda: read_on_side(wait_for_an_earlier_event),
    "read after the host waited": lambda: read_on_side(wait_on_the_host),
    "overwritten beside a read": lambda: read_on_side(wait_for_main, overwrite),
    "freed beside a read": lambda: read_on_side(wait_for_main, free),
    "freed and recorded": lambda: read_on_side(wait_for_main, record_and_free),
    "freed and waited for": lambda: read_on_side(wait_for_main, free_and_wait),
    "copy read too early": lambda: CopyMemory().copies([on_the_device()])[0].sum(),
    "copy read in time": lambda: accelerator.HostCopy(on_the_device()).wait()[0].tolist(),
    "source overwritten beside a copy": lambda: overwrite_source(True),
    "source that is not pinned": lambda: overwrite_source(False),
}
