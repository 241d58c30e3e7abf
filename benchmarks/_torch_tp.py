"""The benchmark's GPT as torch's tensor parallelism wants it: a module of `nn.Linear`s under `parallelize_module`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _model import Size, params
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)


class TorchBlock(nn.Module):
    """Attention and MLP, with the leaves of `models.gpt`."""

    def __init__(self, size: Size, leaves: dict[str, Tensor]) -> None:
        super().__init__()
        self.head_dim = size.d_model // size.num_heads
        self.q, self.k, self.v, self.o = (_linear(leaves[f"w{name}"], leaves[f"b{name}"]) for name in "qkvo")
        self.up, self.down = (_linear(leaves[f"w_{name}"], leaves[f"b_{name}"]) for name in ("up", "down"))
        self.norm1, self.norm2 = (_norm(leaves[f"norm{i}_w"], leaves[f"norm{i}_b"]) for i in (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """The block on [B, T, D]."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TorchGPT(nn.Module):
    """`gpt.loss` of the benchmark's model: `forward(tokens)`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        tree = params(size)
        self.embed = nn.Embedding.from_pretrained(tree["embed"], freeze=False)
        self.position = nn.Parameter(tree["position"])
        self.blocks = nn.ModuleList(TorchBlock(size, leaves) for leaves in tree["blocks"])
        self.norm = _norm(tree["norm_w"], tree["norm_b"])
        self.head = _linear(tree["head"], None)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss on tokens [B, T + 1]."""
        x = self.embed(tokens[:, :-1]) + self.position[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def torch_tp_step(world: int, size: Size, adamw: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """`step(tokens) -> loss` of that module over `world` ranks, the vocabulary cut in the embedding, head and loss."""
    mesh = init_device_mesh("cpu", (world,))
    model = TorchGPT(size)
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    columns, rows = ("q", "k", "v", "up"), ("o", "down")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    # A fused update takes tensors of one kind: those that are cut, and those that are whole.
    groups = [[p for p in model.parameters() if isinstance(p.data, DTensor) == cut] for cut in (True, False)]
    optimizers = [torch.optim.AdamW(group, fused=True, **adamw) for group in groups]

    def step(tokens: Tensor) -> Tensor:
        with loss_parallel():
            loss = model(tokens)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

    return step


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def _norm(weight: Tensor, bias: Tensor) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(weight))
    norm.weight, norm.bias = nn.Parameter(weight), nn.Parameter(bias)
    return norm
