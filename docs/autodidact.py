"""shardfn from scratch: ZeRO-3 in one file, with torch alone and ranks that are entries of a list.

    python docs/autodidact.py

A rank keeps a third of each parameter. The loss below is written for one device and knows nothing of that: a leaf
becomes whole when an operation uses it, the graph does not keep it, the backward makes it whole again, and its gradient
ends up where its parameter lives. The result is the one-device step's. The library itself adds real ranks, one gather
for neighbouring uses, transfers that overlap with arithmetic, other axes, and errors.
"""

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

N = 3  # ranks along the one axis of our mesh, "dp"


# 1. Layouts. A spec has one entry a dim: None, or the axis that cuts it.


def zero_spec(shape):
    """ZeRO's rule: cut the first dim; a leaf without one is kept by every rank."""
    return ("dp",) if shape and shape[0] > 1 else ()


def blocks_of(x, spec):
    """One block a rank: ceil(rows / N) rows each, the last ones short or empty; no size must divide anything."""
    if "dp" not in spec:
        return [x] * N
    dim = spec.index("dp")
    rows, step = x.shape[dim], -(-x.shape[dim] // N)
    return list(x.split([max(0, min(step, rows - r * step)) for r in range(N)], dim))


# 2. Collectives: functions from a list (the ranks' inputs) to a list (the ranks' results), each other's transpose.


def all_gather(blocks, spec):
    """[A] [B] => [A, B] [A, B]"""
    whole = torch.cat(list(blocks), spec.index("dp")) if "dp" in spec else blocks[0]
    return [whole.clone() for _ in blocks]


def reduce_scatter(wholes, spec):
    """[A, B] [C, D] => [A + C] [B + D]. A leaf that nothing cuts is summed whole."""
    return [block.clone() for block in blocks_of(sum(wholes), spec)]


TRANSPOSE = {all_gather: reduce_scatter, reduce_scatter: all_gather}


class Collective(torch.autograd.Function):
    """A row of the table; the backward is another row."""

    @staticmethod
    def forward(ctx, f, spec, *xs):
        ctx.f, ctx.spec = f, spec
        return tuple(f(xs, spec))

    @staticmethod
    def backward(ctx, *cotangents):
        return None, None, *Collective.apply(TRANSPOSE[ctx.f], ctx.spec, *cotangents)


# 3. A lazy leaf: a tensor with a shape and no storage, which becomes whole when an operation takes it.


class Whole(torch.autograd.Function):
    """handle -> whole leaf. The handle costs no memory; it is where the sum of the gradients of all uses arrives."""

    @staticmethod
    def forward(ctx, handle, fetch):
        return fetch()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class LazyLeaf(torch.Tensor):
    @staticmethod
    def __new__(cls, handle, fetch):
        leaf = torch.Tensor._make_wrapper_subclass(cls, handle.shape, dtype=handle.dtype)
        leaf.handle, leaf.fetch = handle, fetch
        return leaf

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.dim):  # asking costs nothing
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args = [Whole.apply(x.handle, x.fetch) if isinstance(x, LazyLeaf) else x for x in args]
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"a lazy leaf reached {func} unopened")


# 4. Saved-tensor hooks: where autograd would keep a whole weight, it keeps the leaf's name and the view's geometry.


class Book:
    """One rank's gathers of one step."""

    def __init__(self, blocks, specs):
        self.blocks, self.specs = blocks, specs
        self.known, self.gathered, self.kept = {}, [], 0

    def fetch(self, name):
        self.gathered.append(name)
        whole = all_gather(self.blocks[name], self.specs[name])[0]
        storage = whole.untyped_storage()
        # The weak reference keeps the address from being reused, so that it names this storage and no other.
        self.known[storage._cdata] = name, StorageWeakRef(storage)
        return whole

    def pack(self, x):
        if x.untyped_storage()._cdata in self.known:
            return self.known[x.untyped_storage()._cdata][0], x.size(), x.stride(), x.storage_offset()
        self.kept += x.numel()
        return x

    def unpack(self, saved):
        if isinstance(saved, torch.Tensor):
            return saved
        name, *geometry = saved
        return self.fetch(name).as_strided(*geometry)


# 5. The step.


def adam(p, g, mu, nu, t, lr=0.01, b1=0.9, b2=0.999, eps=1e-8):
    """Elementwise, so it does not care whether it sees leaves or blocks of leaves."""
    mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g
    return p - lr * (mu / (1 - b1**t)) / ((nu / (1 - b2**t)).sqrt() + eps), mu, nu


def one_device_step(loss, params, mu, nu, t, batch):
    handles = {k: p.clone().requires_grad_() for k, p in params.items()}
    grads = torch.autograd.grad(loss(handles, batch), list(handles.values()))
    new = {k: adam(params[k], g, mu[k], nu[k], t) for k, g in zip(params, grads, strict=True)}
    return tuple({k: x[i] for k, x in new.items()} for i in range(3))


def zero3_step(loss, specs, shapes, params, mu, nu, t, batch):
    """The same on N ranks: params, mu and nu are {leaf: [block of rank 0, ...]}. Also returns the ranks' books."""
    rows, wholes, books = blocks_of(batch, ("dp",)), {k: [] for k in params}, []
    for shard_rows in rows:  # on a real mesh all at once: nothing below reads another rank's results
        book = Book(params, specs)
        handles = {k: batch.new_empty(()).expand(shapes[k]).requires_grad_() for k in params}
        leaves = {k: LazyLeaf(handles[k], functools.partial(book.fetch, k)) for k in params}
        with torch.autograd.graph.saved_tensors_hooks(book.pack, book.unpack):
            value = loss(leaves, shard_rows) * len(shard_rows) / len(batch)  # the global mean, by weights
        for k, grad in zip(params, torch.autograd.grad(value, list(handles.values())), strict=True):
            wholes[k].append(grad)
        books.append(book)
    grads = {k: reduce_scatter(wholes[k], specs[k]) for k in params}
    new = {k: [adam(*x, t) for x in zip(params[k], grads[k], mu[k], nu[k], strict=True)] for k in params}
    return *({k: [x[i] for x in blocks] for k, blocks in new.items()} for i in range(3)), books


# 6. See for yourself.


def loss(params, x):
    """Written for one device; uses `tied` twice, on two sides of a nonlinearity."""
    h = torch.tanh(x @ params["tied"].t() + params["bias"]) * params["scale"]
    return ((h @ params["tied"] - x) ** 2).mean()


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    whole = {"tied": torch.randn(7, 5), "bias": torch.randn(7), "scale": torch.randn(())}
    shapes = {k: p.shape for k, p in whole.items()}
    specs = {k: zero_spec(s) for k, s in shapes.items()}
    params = {k: blocks_of(p, specs[k]) for k, p in whole.items()}
    print("1. blocks of tied (7, 5):", *(tuple(b.shape) for b in params["tied"]))

    x = [b.clone().requires_grad_() for b in params["tied"]]
    y = Collective.apply(all_gather, specs["tied"], *x)
    z = [torch.randn(7, 5) for _ in y]
    back = torch.autograd.grad(y, x, z)
    a, b = (sum((p * q).sum().item() for p, q in zip(s, t, strict=True)) for s, t in ((y, z), (x, back)))
    assert abs(a - b) < 1e-12
    print(f"2. reduce_scatter is all_gather's transpose: <A x, z> = {a:.6f} = <x, A' z> = {b:.6f}")

    zeros = {k: torch.zeros_like(p) for k, p in whole.items()}
    one = whole, zeros, zeros
    many = params, *({k: blocks_of(z, specs[k]) for k, z in zeros.items()} for _ in range(2))
    for t in range(1, 6):
        batch = torch.randn(8, 5)
        one = one_device_step(loss, *one, t, batch)
        *many, books = zero3_step(loss, specs, shapes, *many, t, batch)
    forward, backward = books[0].gathered[:4], books[0].gathered[4:]
    print("3. rank 0 made whole in the forward:", *forward, "- and in the backward:", *backward)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s.numel()) or s, lambda s: s):
        loss({k: p.clone().requires_grad_() for k, p in whole.items()}, blocks_of(batch, ("dp",))[0])
    print(f"4. rank 0's graph kept {books[0].kept} numbers, all of them activations; the plain one keeps {sum(saved)}")
    assert books[0].kept == sum(saved) - sum(whole[k].numel() for k in backward)

    worst = max((all_gather(m[k], specs[k])[0] - w[k]).abs().max() for m, w in zip(many, one, strict=True) for k in w)
    assert worst < 1e-12
    at_rest = [sum(p[r].numel() for p in many[0].values()) for r in range(N)]
    print(f"5. after 5 steps ranks keep {at_rest} of {sum(p.numel() for p in whole.values())} parameters,")
    print(f"   and differ from one device by {worst:.1e} at most (parameters and both Adam moments)")


if __name__ == "__main__":
    main()
