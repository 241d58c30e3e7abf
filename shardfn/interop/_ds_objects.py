"""The few objects of DeepSpeed in checkpoints, written without DeepSpeed.

A pickle names a class by module and name. Python's pickler looks both up before the writing. Here both are written
without a look-up, for a program that has the class.
"""

import os
import pickle
import types
from typing import Any

import torch


class _Named:
    """Object of a class that is elsewhere, written with the attributes."""

    at = ("", "")

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class LossScaler(_Named):
    """Constant loss scale."""

    at = ("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


class DynamicLossScaler(_Named):
    """Loss scale that falls with overflows."""

    at = ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")


class FragmentAddress(_Named):
    """Place of a parameter's elements in a rank's part of a group."""

    at = ("deepspeed.utils.tensor_fragment", "fragment_address")


class ZeroStage(_Named):
    """Number of a stage."""

    at = ("deepspeed.runtime.zero.config", "ZeroStageEnum")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__dict__["stage"],)


class _Pickler(pickle._Pickler):  # the pickler in Python: the pickler in C has no way to override the writing of names
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, _Named)):
            # The stubs lack the three methods called here.
            super().save_global(obj, name)  # pyright: ignore[reportAttributeAccessIssue]
            return
        module, other = obj.at
        self.write(pickle.GLOBAL + f"{module}\n{other}\n".encode())  # pyright: ignore[reportAttributeAccessIssue]
        self.memoize(obj)  # pyright: ignore[reportAttributeAccessIssue]


_MODULE = types.ModuleType("deepspeed_pickles")
_MODULE.__dict__["Pickler"] = _Pickler


def save_objects(value: Any, path: os.PathLike[str]) -> None:
    """Writes a value as `torch.save` does, where the value may contain objects of this file.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.pt"
        >>> save_objects({"stage": ZeroStage(stage=2), "x": torch.ones(2)}, path)
        >>> torch.serialization.get_unsafe_globals_in_checkpoint(path)
        ['deepspeed.runtime.zero.config.ZeroStageEnum']
    """
    torch.save(value, path, pickle_module=_MODULE)
