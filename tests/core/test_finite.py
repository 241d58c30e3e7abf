"""Covers shardfn/core/_texts.py: elements that are not finite, by leaf."""

import pytest
import torch

from shardfn.core import count_nonfinite, raise_nonfinite


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn])
def test_elements_of_all_types_are_counted(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, torch.nan, 2.0]).to(dtype)
    assert count_nonfinite(x) == 1 and count_nonfinite(x[:1]) == 0


def test_leaves_are_named_with_their_counts() -> None:
    raise_nonfinite("weights", {}, 3)
    found = {f"w{i}": (i + 1, 1000) for i in range(12)}
    with pytest.raises(ValueError, match=r"must be finite, got .* in 12 of 20 leaves.*\n  - w0: 1 of 1,000") as caught:
        raise_nonfinite("weights", found, 20)
    assert "w9" in str(caught.value) and "w10" not in str(caught.value) and "and 2 more" in str(caught.value)
