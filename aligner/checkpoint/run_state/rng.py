"""Random-number states of a process as a tree of tensors and plain values."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def capture_rng(device_state: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Return the states of Python's, NumPy's (global), torch's CPU and the device's generators.

    ``device_state`` returns a tree, for example the accelerator's generator state or the named
    states of a model-parallel tracker.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64),
            "gauss": gauss,
        },
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "device": device_state(),
    }


def restore_rng(
    state: Mapping[str, Any], set_device_state: Callable[[Any], None] = lambda _: None
) -> None:
    """Restore the states of `capture_rng`. ``set_device_state`` receives the device's state."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"].clone())
    set_device_state(state["device"])
