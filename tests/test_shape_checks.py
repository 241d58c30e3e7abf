"""Covers `tests/shape_checks.py`: the checks that it adds to a module, and the functions that it leaves alone."""

import gc
import importlib
import pathlib
import sys
import textwrap
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest
import shape_checks
import torch
from jaxtyping import TypeCheckError

SOURCE = """
    import dataclasses
    from collections.abc import Callable, Iterator
    from typing import Any, no_type_check

    from jaxtyping import Float
    from torch import Tensor

    def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        return a @ b

    def transposed(a: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        return a.T

    def at_least(x: float, *more: int, by: "float" = 0.5, **names: str) -> float:
        return x

    def lies() -> int:
        return "no int"

    def adder(n: int) -> Callable[[int], int]:
        def add(m: int) -> int:
            return n + m

        return add

    def of_later(x: "Later") -> "Later":
        return x

    def without(x, y=1):
        return x

    def each(n: int) -> Iterator[int]:
        yield from range(n)

    @no_type_check
    def free(x: int) -> int:
        return x

    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int

        @staticmethod
        def of(x: int) -> "Point":
            return Point(x)

        @property
        def bad(self) -> str:
            return self.x

    class Later:
        pass

    def holder(held: Later) -> Callable[[], int]:
        def size(x: Later | None = held) -> int:
            return 1 if x is held else 2

        return size
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "annotated_things.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = sys.meta_path[:]
    shape_checks.install(["annotated_things"])
    yield importlib.import_module("annotated_things")
    sys.meta_path[:] = before
    del sys.modules["annotated_things"]


def test_sizes_of_one_name_are_the_same_in_one_call(module: ModuleType) -> None:
    assert module.product(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    assert module.product(torch.ones(5, 1), torch.ones(1, 1)).shape == (5, 1)
    with pytest.raises(TypeCheckError, match=r"product\(\) parameter b="):
        module.product(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(TypeCheckError, match=r"transposed\(\) return"):
        module.transposed(torch.ones(2, 3))
    assert module.transposed(torch.ones(3, 3)).shape == (3, 3)


def test_arguments_of_all_kinds_and_results(module: ModuleType) -> None:
    assert module.at_least(1, 2, 3, by=2, name="x") == 1
    for args, kwargs in [(("x",), {}), ((1, "y"), {}), ((1,), {"by": "z"}), ((1,), {"name": 2})]:
        with pytest.raises(TypeCheckError, match="at_least"):
            module.at_least(*args, **kwargs)
    with pytest.raises(TypeError, match=r"at_least\(\) missing 1 required positional argument: 'x'"):
        module.at_least()
    with pytest.raises(TypeCheckError, match=r"lies\(\) return"):
        module.lies()
    assert list(module.each(3)) == [0, 1, 2]


def test_functions_inside_functions_share_their_checks(module: ModuleType) -> None:
    one, two = module.adder(1), module.adder(2)
    assert (one(1), two(1)) == (2, 3)
    for add in (one, two):
        with pytest.raises(TypeCheckError, match=r"add\(\) parameter m="):
            add("1")
    code = one.__wrapped__.__code__
    assert code is two.__wrapped__.__code__ and id(code) in shape_checks._CHECKS


@pytest.mark.nightly
def test_bindings_of_an_inner_function_end_with_it(module: ModuleType) -> None:
    held = module.Later()
    size, ended = module.holder(held), weakref.ref(held)
    assert (size(), size(None)) == (1, 2)
    with pytest.raises(TypeCheckError, match="parameter x="):
        size(3)
    del held, size
    gc.collect()
    assert ended() is None


def test_classes(module: ModuleType) -> None:
    assert module.Point.of(3) == module.Point(3)
    with pytest.raises(TypeCheckError, match="parameter x="):
        module.Point("3")
    with pytest.raises(TypeCheckError, match=r"bad\(\) return"):
        _ = module.Point(3).bad


def test_annotations_that_are_left_alone(module: ModuleType) -> None:
    assert module.of_later(1) == 1  # names defined later accept anything, as in jaxtyping's hook
    assert module.free("x") == module.without("x") == "x"
    assert not hasattr(module.without, "__wrapped__") and not hasattr(module.free, "__wrapped__")


def test_compiled_code_is_kept_until_the_file_changes(
    module: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = module.__spec__
    assert spec is not None and isinstance(spec.loader, shape_checks._Loader)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    first = spec.loader.get_code("annotated_things")
    (kept,) = tmp_path.glob("__pycache__/*.pyc")
    written = kept.stat().st_mtime_ns
    assert spec.loader.get_code("annotated_things") == first and kept.stat().st_mtime_ns == written
    kept.write_bytes(kept.read_bytes()[:20])
    assert spec.loader.get_code("annotated_things") == first and kept.stat().st_size > 20
    (tmp_path / "annotated_things.py").write_text("x = 1\n")
    assert "x" in spec.loader.get_code("annotated_things").co_names
