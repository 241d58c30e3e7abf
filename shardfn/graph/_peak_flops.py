"""`peak_flops`: the rate of a device, known by name or measured."""

import re

import torch

from shardfn.core import dtype_name

from ._calibrate import measure_rate
from ._device import DEVICES

# Words of the names that drivers give, each with an entry of `DEVICES`. The first that fits counts.
_NAMES = {
    r"V100.*32": "v100-32",
    r"A100.*80": "a100-80",
    r"A100": "a100-40",
    r"H100 (SXM|80GB HBM3)": "h100",
    r"H200": "h200",
    r"B200": "b200",
    r"RTX 4090": "rtx4090",
    r"RTX A6000": "a6000",
}


def peak_flops(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, *, seconds: float = 0.5
) -> float:
    """Returns the floating-point operations a second of a device, for model FLOPs utilisation.

    For a GPU in `DEVICES` the vendor's figure. For any other device the rate of the fastest of several matrix products
    that run now, so utilisation is then a fraction of this rate.

    Args:
        device: device, such as `mesh.device`. For all devices of a mesh multiply by `mesh.size`.
        dtype: dtype of the products.
        seconds: approximate time of a measurement.

    Example:
        >>> peak_flops("cpu", torch.float32, seconds=0.01) > 0
        True
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = known_device(name)
    rates = {} if known is None else DEVICES[known].device.flops
    return rates.get(dtype_name(dtype)) or measure_rate(dtype, device, seconds)


def known_device(name: str) -> str | None:
    """Returns the entry of `DEVICES` for a driver's name of a device, or None if the device is not listed.

    Example:
        >>> known_device("NVIDIA H100 80GB HBM3"), known_device("NVIDIA T4")
        ('h100', None)
    """
    return next((entry for pattern, entry in _NAMES.items() if re.search(pattern, name)), None)
