"""Covers mistakes with meshes, specs, rules of ZeRO, keys and policies."""

from typing import Any

import pytest
import torch

import shardfn
from shardfn.testing import distributed
from tests.mistakes import Mistake, cases, check, check_on_all_ranks

sf: Any = shardfn  # many of these are errors of types, too
P, Zero = sf.P, sf.Zero
_NO_GPU = Mistake("the device is a GPU of another machine", lambda: sf.make_mesh(device="cuda"),
                  ValueError, "make_mesh(device='cuda'): torch", "write device='cpu'")  # fmt: skip
MISTAKES = [
    # A mesh.
    Mistake("the axes are a tuple", lambda: sf.make_mesh(("dp",)),
            TypeError, "make_mesh(('dp',))", "make_mesh({'dp': -1})"),
    Mistake("the axes are keywords", lambda: sf.make_mesh(dp=2), TypeError, "no argument 'dp'", "make_mesh({'dp': 2})"),
    Mistake("the axes are a number", lambda: sf.make_mesh(2),
            TypeError, "make_mesh(2): this is of type int", "make_mesh({'dp': 2})"),
    Mistake("the size of an axis is a float", lambda: sf.make_mesh({"dp": 2.0}),
            TypeError, "but not 'dp': 2.0", "a dict of names and sizes"),
    Mistake("the axis has more ranks than there are", lambda: sf.make_mesh({"dp": 8}),
            ValueError, "{'dp': 8} does not fit ... rank", "torchrun --nproc-per-node 8"),
    Mistake("the axes have more ranks than there are", lambda: sf.make_mesh({"dp": 3, "tp": 2}),
            ValueError, "{'dp': 3, 'tp': 2} does not fit ... rank", "torchrun --nproc-per-node 6"),
    Mistake("the device has another name", lambda: sf.make_mesh(device="gpu"),
            ValueError, "device='gpu'", "'cuda' or 'cpu'"),
    *([] if torch.cuda.is_available() else [_NO_GPU]),
    # A spec.
    Mistake("the spec has a dim", lambda: P(0),
            TypeError, "P entry 0 is of type int", "P(None, 'tp') cuts dim 1 along 'tp'"),
    Mistake("the spec has an axis twice", lambda: P("dp", "dp"),
            ValueError, "P('dp', 'dp') uses axis 'dp' twice", "An axis can shard only one dim"),
    # A rule of ZeRO.
    Mistake("the stage is four", lambda: Zero(4), ValueError, "Zero(stage=4)", "0, 1, 2 and 3"),
    Mistake("the states are on the cpu", lambda: Zero(3, optimizer="cpu"),
            ValueError, "Zero(optimizer='cpu') ... ('device', 'host', 'disk')", "Did you mean 'host'?"),
    Mistake("the states are on a disk without a path", lambda: Zero(3, optimizer="disk"),
            ValueError, "Zero(optimizer='disk') keeps states on disk", "Zero(disk=Disk('/path"),
    Mistake("the rule has no such field", lambda: Zero(3, offload="cpu"),
            TypeError, "Zero has no field 'offload'", "optimizer, optimizer_fraction"),
    Mistake("the accumulation has a misspelt name", lambda: Zero.flat(accumulate="eech"),
            ValueError, "accumulate='eech'): use 'each' or 'once'", "Did you mean 'each'?"),
    Mistake("the bytes to prefetch are negative", lambda: Zero.flat(prefetch_bytes=-1),
            ValueError, "prefetch_bytes=-1", "must not be negative"),
    # A key.
    Mistake("the key is a seed", lambda: sf.fold_in(7, 1), TypeError, "fold_in: key is 7, an int", "sf.key(7)"),
    # A policy.
    Mistake("the exceptions of a policy are a list", lambda: sf.Policy.bf16(exceptions=["norm"]),
            TypeError, "Policy(exceptions=['norm'])", "exceptions={'norm': torch.float32}"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)


def test_a_mesh_without_axes_is_one() -> None:
    assert sf.make_mesh({}).shape == {}
