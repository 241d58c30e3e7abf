"""The benchmark's GPT as torch's tensor parallelism wants it: a module of `nn.Linear`s under `parallelize_module`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _model import Size, params
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

NAMES = {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "up": "w_up", "down": "w_down"}
BIASES = {"q": "bq", "k": "bk", "v": "bv", "o": "bo", "up": "b_up", "down": "b_down"}


class TorchBlock(nn.Module):
    """Attention and MLP, with the leaves of `models.gpt`."""

    def __init__(self, size: Size, leaves: dict[str, Tensor]) -> None:
        super().__init__()
        self.head_dim = size.d_model // size.num_heads
        for name, leaf in NAMES.items():
            rows, columns = leaves[leaf].shape
            linear = nn.Linear(columns, rows, bias=True)
            linear.weight, linear.bias = nn.Parameter(leaves[leaf]), nn.Parameter(leaves[BIASES[name]])
            self.add_module(name, linear)
        for name in ("norm1", "norm2"):
            norm = nn.LayerNorm(size.d_model)
            norm.weight, norm.bias = nn.Parameter(leaves[f"{name}_w"]), nn.Parameter(leaves[f"{name}_b"])
            self.add_module(name, norm)

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
        self.norm = nn.LayerNorm(size.d_model)
        self.norm.weight, self.norm.bias = nn.Parameter(tree["norm_w"]), nn.Parameter(tree["norm_b"])
        self.head = nn.Linear(size.d_model, size.vocab, bias=False)
        self.head.weight = nn.Parameter(tree["head"])

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
    plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    by_mesh = [
        [p for p in model.parameters() if isinstance(p.data, torch.distributed.tensor.DTensor)],
        [p for p in model.parameters() if not isinstance(p.data, torch.distributed.tensor.DTensor)],
    ]
    optimizers = [torch.optim.AdamW(group, fused=True, **adamw) for group in by_mesh]  # pyright: ignore

    def step(tokens: Tensor) -> Tensor:
        with loss_parallel():
            loss = model(tokens)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()

    return step
