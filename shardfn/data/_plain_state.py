"""The state of a loader as values of JSON, and back: tensors, arrays, bytes and tuples are marked."""

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MARK = "is a"


def to_json(x: Any) -> Any:
    """Returns a nested state as values of JSON.

    Raises:
        TypeError: the state has an object of another type. The message names the type.

    Example:
        >>> state = {"order": torch.tensor([2, 0, 1]), "pair": (1, b"x")}
        >>> back = of_json(to_json(state))
        >>> back["order"], back["pair"]
        (tensor([2, 0, 1]), (1, b'x'))
    """
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, np.generic):
        return to_json(x.item())
    if isinstance(x, bytes):
        return {_MARK: "bytes", "base64": base64.b64encode(x).decode()}
    if isinstance(x, Tensor | np.ndarray):
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else x
        if array.dtype.hasobject:
            raise TypeError(f"the loader's state has an array of {array.dtype}, which no JSON holds.")
        kind = "tensor" if isinstance(x, Tensor) else "array"
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {_MARK: kind, "dtype": array.dtype.str, "shape": list(array.shape), "base64": data}
    if isinstance(x, list):
        return [to_json(y) for y in x]
    if isinstance(x, tuple):
        return {_MARK: "tuple", "items": [to_json(y) for y in x]}
    if isinstance(x, dict):
        return {_MARK: "dict", "items": [[to_json(k), to_json(v)] for k, v in x.items()]}
    raise TypeError(
        f"the loader's state has a {type(x).__module__}.{type(x).__qualname__}, which no JSON holds. Let its"
        " state_dict() return numbers, texts, bytes, tensors, lists, tuples and dicts, or pass resume='replay'."
    )


def of_json(x: Any) -> Any:
    """Returns the state that `to_json` converted to `x`."""
    if isinstance(x, list):
        return [of_json(y) for y in x]
    if not isinstance(x, dict):
        return x
    if x[_MARK] == "dict":
        return {of_json(k): of_json(v) for k, v in x["items"]}
    if x[_MARK] == "tuple":
        return tuple(of_json(y) for y in x["items"])
    data = base64.b64decode(x["base64"])
    if x[_MARK] == "bytes":
        return data
    array = np.frombuffer(data, np.dtype(x["dtype"])).reshape(x["shape"]).copy()
    return torch.from_numpy(array) if x[_MARK] == "tensor" else array
