"""Covers mistakes with transforms: their order and their arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn
from shardfn.testing import distributed
from tests.mistakes import Mistake, cases, check, check_on_all_ranks, loss_of, made, mesh_of, run

sf: Any = shardfn  # many of these are errors of types, too
_HIDEN = "the policy goes by 'hiden', but no value of the function has the name"
_SINGLE = torch.float32


def _named(params: dict, batch: dict) -> Tensor:
    return (sf.checkpoint_name(batch["x"] @ params["w"], "hidden") ** 2).mean()


def _mapped(out_specs: Any) -> Any:
    return sf.shard_map(lambda x: x.sum(), mesh=mesh_of(), in_specs=sf.P(), out_specs=out_specs)(torch.ones(4))


MISTAKES = [
    Mistake("jit is around a step", lambda: sf.jit(made()), ValueError, "jit(sharded(f))", "Use sharded(jit(f), ...)"),
    Mistake("remat is around microbatches", lambda: sf.remat(sf.accumulate(loss_of, 2)),
            ValueError, "remat(accumulate(f, n))", "Use accumulate(remat(f), n)"),
    Mistake("the number of microbatches comes first", lambda: sf.accumulate(2, loss_of),
            TypeError, "accumulate takes a function ... and this is of type int", "loss(params, batch)"),
    Mistake("the number of microbatches is zero", lambda: sf.accumulate(loss_of, 0),
            ValueError, "microbatches, got 0", "accumulate needs a positive number"),
    Mistake("the microbatches do not divide the rows", lambda: run(sf.accumulate(loss_of, 3)),
            ValueError, "accumulate(3) ... batch['x'] has 2 rows; ... batch['x'] has 1 row", "a divisor of the rows"),
    Mistake("the policy is a dtype", lambda: sf.mixed_precision(loss_of, torch.bfloat16),
            TypeError, "mixed_precision(loss, torch.bfloat16)", "write sf.Policy.bf16()"),
    Mistake("an exception of the policy meets the other leaves",
            lambda: run(sf.mixed_precision(loss_of, sf.Policy.bf16(exceptions={"w": _SINGLE}))),
            RuntimeError, "in torch.bfloat16 ... params['w'] is computed in torch.float32", "x @ w.to(x.dtype)"),
    Mistake("offload goes by a misspelt name",
            lambda: run(sf.offload(_named, sf.policies.offload_only_these_names("hiden"))),
            UserWarning, f"offload: {_HIDEN}", "Did you mean 'hidden'?"),
    Mistake("remat goes by a misspelt name",
            lambda: run(sf.remat(_named, sf.policies.save_only_these_names("hiden"))),
            UserWarning, f"remat: {_HIDEN}", "Did you mean 'hidden'?"),
    Mistake("out_specs have more entries than the result has dims", lambda: _mapped(sf.P(None, "dp")),
            ValueError, "result of shape () has spec P(None, 'dp') in out_specs", "more entries than it has dims"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.nightly
@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)
