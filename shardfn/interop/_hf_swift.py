"""SwiftKV in `config.json`, under the names of Arctic's models, such as the type "llama_swiftkv"."""

from collections.abc import Mapping
from typing import Any

from shardfn.models import gpt

SWIFT = "_swiftkv"
_FIRST, _GROUP = "num_key_value_layers", "key_value_group_size"


def split_swift(told: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents without SwiftKV, and the field of `Config`.

    Raises:
        ValueError: the number of layers is missing.

    Example:
        >>> split_swift({"model_type": "llama_swiftkv", "swiftkv": True, "num_key_value_layers": 2})[1]
        {'swift': Swift(first=2, group=1)}
    """
    kind = str(told.get("model_type"))
    rest = {name: x for name, x in told.items() if name not in ("swiftkv", _FIRST, _GROUP)}
    if not kind.endswith(SWIFT):
        return dict(told), {}
    if _FIRST not in told:
        raise ValueError(f"config.json: model_type={kind!r} must have {_FIRST}, the layers of all tokens.")
    group = 1 if told.get(_GROUP) is None else told[_GROUP]
    fields = {"swift": gpt.Swift(told[_FIRST], group)} if told.get("swiftkv", True) else {}
    return rest | {"model_type": kind.removesuffix(SWIFT)}, fields


def join_swift(told: dict[str, Any], swift: gpt.Swift | None) -> dict[str, Any]:
    """Returns the contents with SwiftKV, the inverse of `split_swift`."""
    if swift is None:
        return told
    [name] = told["architectures"]
    named = {"model_type": told["model_type"] + SWIFT, "architectures": [name.replace("For", "SwiftKVFor")]}
    return told | named | {"swiftkv": True, _FIRST: swift.first, _GROUP: swift.group}
