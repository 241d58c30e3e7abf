"""Writes trl_ppo_goldens.json: rewards, advantages, losses and gradients of PPO in float64, by TRL 0.11's functions.

pip download --no-deps trl==0.11.4 && unzip trl-0.11.4-py3-none-any.whl
python tests/rl/trl_ppo_goldens.py trl

The functions are cut out of the sources, so that no package of TRL is imported. `masked_whiten` is left out.
"""

import ast
import collections.abc
import json
import pathlib
import sys
import types
import typing
import warnings
from typing import Any

import torch
from torch import Tensor

CORE = "masked_mean", "masked_var", "clip_by_value", "entropy_from_logits", "flatten_dict"
TRAINER = "compute_rewards", "_kl_penalty", "compute_advantages", "loss"


def cut(path: pathlib.Path, names: tuple[str, ...], into: dict[str, Any]) -> None:
    """Defines functions of a source."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            exec(compile(ast.Module([node], []), str(path), "exec"), into)


def inputs() -> dict[str, Tensor]:
    """Log probabilities are below 0."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    old, values = -normal(3, 4).abs() - 0.1, normal(3, 4)
    found = {"lengths": torch.tensor([4, 2, 1]), "old": old, "values": values, "scores": 2 * normal(3)}
    found |= {name: old * (0.4 * normal(3, 4)).exp() for name in ("reference", "new")}
    return found | {"new_values": values + 0.3 * normal(3, 4)}


def main() -> None:
    """Runs TRL's functions on the inputs."""
    given, found = pathlib.Path(sys.argv[1]), inputs()
    code: dict[str, Any] = {"torch": torch, "warnings": warnings, "Dict": dict, "List": list}
    code |= {"Optional": typing.Optional, "Mapping": collections.abc.Mapping}
    cut(given / "core.py", CORE, code)
    cut(given / "trainer/ppo_trainer.py", TRAINER, code)
    code["masked_whiten"] = lambda x, mask, shift_mean=True: x
    clips = {"cliprange": 0.2, "cliprange_value": 0.2, "ratio_threshold": 1e9}
    config = types.SimpleNamespace(kl_penalty="kl", whiten_rewards=False, gamma=0.99, lam=0.95, vf_coef=1.0, **clips)
    stub = types.SimpleNamespace(config=config, kl_ctl=types.SimpleNamespace(value=0.1))
    stub._kl_penalty = types.MethodType(code["_kl_penalty"], stub)
    lengths, old, values, scores, reference, new, new_values = found.values()
    mask = (torch.arange(4) < lengths[:, None]).double()
    new, new_values = new.requires_grad_(), new_values.requires_grad_()
    rewards, _, _ = code["compute_rewards"](stub, scores, old, reference, mask)
    _, advantages, returns = code["compute_advantages"](stub, values, rewards, mask)
    logits = torch.zeros(3, 4, 2, dtype=torch.float64)
    policy, value, _ = code["loss"](stub, old, values, logits, new_values, new, mask, advantages, returns)
    (policy_grad,) = torch.autograd.grad(policy, new)
    (value_grad,) = torch.autograd.grad(value, new_values)
    out = found | {"advantages": advantages * mask, "returns": returns * mask, "policy": policy, "value": value}
    out |= {"policy_grad": policy_grad, "value_grad": value_grad}
    lines = [f"{json.dumps(name)}: {json.dumps(x.detach().tolist())}" for name, x in out.items()]
    pathlib.Path(__file__).with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
