"""The model and the batches of `test_deepspeed`, for both sides; it needs torch alone."""

import torch

ROWS, WIDTH, HIDDEN, OUT = 16, 7, 13, 5


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=g), torch.randn(ROWS, OUT, generator=g)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, OUT))
