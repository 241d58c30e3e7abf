"""Covers shardfn/core/_texts.py, and the texts of step, state, mesh, lowered step, ledger and traffic."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shardfn as sf
from shardfn.core import P, size
from shardfn.testing import distributed


def _loss(params: Any, batch: Any) -> torch.Tensor:
    return (batch @ params["w"]).square().mean()


def test_sizes_have_at_most_four_digits() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1 << 20, 1 << 50)] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1024.0 TiB"]


@distributed(world=2)
def test_a_state_is_shown_as_a_table_of_its_blocks() -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    zero = sf.Zero(stage=3, persist_elements=0)
    step = sf.sharded_step(sf.mixed_precision(_loss, sf.Policy.bf16()), sf.optim.sgd(0.1), mesh=mesh, zero=zero)
    assert repr(step) == f"ShardedStep(_loss: ZeRO stage 3, computed in bfloat16; {mesh!r})"
    state = step.init({"w": torch.ones(8, 4)})
    head, columns, *rows = repr(state).splitlines()
    assert head.startswith("TrainState(step 0, ") and head.endswith("here)")
    assert columns.split() == ["path", "shape", "dtype", "spec", "memory", "here"]
    assert rows[0].split() == ["params['w']", "(8,", "4)", "bfloat16", "P('dp')", "device", "32", "B"]
    step(state, torch.ones(2, 8))
    assert "donated" in repr(state)


def test_long_states_are_cut_short() -> None:
    step = sf.sharded_step(lambda p, x: sum(w.sum() for w in p) * x.sum(), sf.optim.sgd(0.1))
    text = repr(step.init([torch.ones(256) for _ in range(50)]))
    assert len(text.splitlines()) == 43 and text.endswith("more, 10.0 KiB here")
    assert "&#x27;" in sf.sharded_step(_loss, sf.optim.sgd(0.1)).init({"w": torch.ones(1, 1)})._repr_html_()


def test_a_mesh_is_drawn() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 1, "tp": 3}, abstract=True)
    assert mesh.drawing().splitlines()[1:] == [
        "            tp 0  tp 1  tp 2",
        "pp 0, dp 0   [0]     1     2",
        "pp 1, dp 0     3     4     5",
    ]
    assert sf.make_mesh({"dp": 1}, device="cpu").drawing().splitlines()[1:] == ["  dp 0", "   [0]"]
    assert mesh._repr_html_().startswith("<pre>Mesh(pp=2")


@pytest.mark.nightly
def test_a_lowered_step_shows_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sf.make_mesh({"dp": 4}, abstract=True)
    step = sf.sharded_step(_loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3))
    lowered = step.lower({"w": torch.ones(8, 4)}, torch.ones(2, 8))
    text = repr(lowered)
    assert text.startswith("Lowered(") and " ops, " in text and text.endswith(f"; {mesh!r})")
    assert str(lowered.memory_analysis()).splitlines()[0] in lowered._repr_html_()
    with sf.memory.ledger() as book:
        torch.zeros(4)
    assert repr(book) == book.table()


@distributed(world=2)
def test_a_leaf_shows_its_own_block_and_sends_nothing() -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    leaf = sf.shard(torch.ones(7, 3), P("dp"), mesh)
    rows = leaf.local.shape[0]
    with sf.count_traffic() as sent:
        text, drawn = repr(leaf), leaf._repr_html_()
    assert sent.calls == 0
    assert text == f"GlobalTensor((7, 3), torch.float32, P('dp'); {12 * rows} B here on device, mesh dp=2)"
    for word in ("(7, 3)", "float32", f"({rows}, 3)", f"{12 * rows} B here on device", "[1]" if rows == 3 else "[0]"):
        assert word in drawn
    leaf.donate()
    assert repr(leaf) == "GlobalTensor((7, 3), donated, P('dp'); nothing here on device, mesh dp=2)"
    assert "donated" in leaf._repr_html_() and "block   none" in leaf._repr_html_()


def test_a_leaf_without_data_is_shown_and_so_is_one_that_is_mapped_over() -> None:
    mesh = sf.make_mesh({"dp": 4}, abstract=True)
    step = sf.sharded_step(_loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    leaf = step.init({"w": torch.empty(8, 4, device="meta")}).params["w"]
    assert repr(leaf) == "GlobalTensor((8, 4), torch.float32, P('dp'); 32 B a rank on device, mesh dp=4)"
    with FakeTensorMode():
        fake = sf.shard(torch.ones(8, 4), P(), sf.make_mesh({"dp": 1}, device="cpu"))
        assert "128 B a rank on device" in repr(fake) and "128 B a rank" in fake._repr_html_()
    seen = list[str]()

    def look(x: Any) -> Any:
        seen.extend([repr(x), x._repr_html_()])
        return x

    torch.func.vmap(look)(sf.collectives.stack([sf.shard(torch.ones(3), P(), mesh)] * 2))
    assert "(3,)" in seen[0] and "(3,)" in seen[1]


def test_a_step_and_traffic_are_shown_in_a_notebook() -> None:
    step = sf.sharded_step(_loss, sf.optim.sgd(0.1))
    assert step._repr_html_().startswith("<pre>ShardedStep(_loss: ZeRO stage")
    with sf.count_traffic() as sent:
        step(step.init({"w": torch.ones(2, 2)}), torch.ones(1, 2))
    assert repr(sent) == str(sent) and sent._repr_html_().startswith("<pre>collective")
