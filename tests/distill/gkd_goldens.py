"""Writes gkd_goldens.json: losses and gradients of the GKD trainer of TRL 1.16 in float64.

PYTHON_WITH_TRL tests/distill/gkd_goldens.py
"""

import json
import math
import pathlib
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]  # of another environment
from trl.experimental.gkd import GKDTrainer  # pyright: ignore[reportMissingImports]

OUT = pathlib.Path(__file__).with_suffix(".json")
SHAPE = (2, 3, 7)
# Arguments of `distill.logits`, and TRL's beta.
CASES: list[tuple[dict[str, Any], float]] = [
    ({"direction": "forward"}, 0.0),
    ({"direction": "forward", "temperature": 2.5}, 0.0),
    ({"direction": "reverse"}, 1.0),
    ({"direction": "reverse", "temperature": 0.5}, 1.0),
    ({"direction": "jensen"}, 0.5),
    ({"direction": "jensen", "beta": 0.1}, 0.1),
    ({"direction": "jensen", "beta": 0.9, "temperature": 3.0}, 0.9),
]


def wave(a: float, scale: float) -> torch.Tensor:
    numbers = [scale * math.sin(a * i + 0.3 * i * i) for i in range(math.prod(SHAPE))]
    return torch.tensor(numbers, dtype=torch.float64).view(SHAPE)


def main() -> None:
    student, teacher, targets = wave(1.3, 2.0), wave(0.7, 4.0), torch.tensor([[0, -100, 6], [3, 2, -100]])
    found = []
    for ours, beta in CASES:
        x, t = student.clone().requires_grad_(), ours.get("temperature", 1.0)
        loss = GKDTrainer.generalized_jsd_loss(x, teacher, targets, beta=beta, temperature=t)
        (grad,) = torch.autograd.grad(loss, x)
        found.append({"options": ours, "loss": loss.item(), "gradient": grad.tolist()})
    given = {"student": student.tolist(), "teacher": teacher.tolist(), "targets": targets.tolist()}
    OUT.write_text(json.dumps({"trl": trl.__version__, **given, "cases": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
