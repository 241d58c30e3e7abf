"""The closed table of collectives: each linear, each with a transpose in the same table.

    psum                 V -> I    pvary
    pvary                I -> V    psum
    all_gather           V -> V    psum_scatter
    psum_scatter         V -> V    all_gather
    all_gather_invariant V -> I    take_own_block
    take_own_block       I -> V    all_gather_invariant
    all_to_all           V -> V    all_to_all, dims swapped
    ppermute             V -> V    ppermute, inverse
    pmax                 V -> I    none: not linear
    quantized_all_gather V -> V    psum_scatter; its tangent is all_gather's, as if it did not round
    ragged_all_to_all    V -> V    ragged_all_to_all, from where rows have gone to where they were
    ragged_places        V -> V    none: integers

`I` is a value that is equal on all ranks and counts once. `V` is a value that differs. The cotangent of an `I` value is
`I`: every rank must compute the same cotangent. References: the `shard_map` design note of JAX (JEP 14273) for the
types; Radul et al., "You Only Linearize Once", POPL 2023, for the transposition.

Notes, in a capture, the line of the user's code that calls a collective, and the collective of an op.

A forward collective runs under the user's frame. The transpose runs in the backward, where the frame is gone. So a
primitive notes the line when applied, and the transpose is recorded under the same line.

Results of transfers that a caller around may keep, in place of a second transfer in a recomputation.

A keeper sees the result of each primitive that sends something, whole: the operations that pack and unpack messages are
no part of the function. `as_one` joins the transfers of a single collective: a name then means the collective's value.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardfn import core, kernels
from shardfn._torch import forward_level, peek_interpreter_stack

from . import _native as native
from ._axis_group import AxisGroup
from ._function_modes import began
from ._message import gather_rows


class Applied(NamedTuple):
    """Application of a primitive. Ops of a graph are part of an application.

    Attributes:
        name: name of the primitive.
        axes: axes of the primitive, in the mesh's order.
        number: number of the application.
        transposes: the number of the transposed application, or 0 for an application of the program itself.
    """

    name: str
    axes: tuple[str, ...]
    number: int
    transposes: int


_FINDER = core.Ambient[Callable[[], str | None]]("finds the line of the user's code")
_FIXED = core.Ambient[tuple[str | None]]("the line of the user's code")
_APPLIED = core.Ambient[Applied]("application of a collective")


def record_call_sites(find: Callable[[], str | None]) -> AbstractContextManager[Any]:
    """Makes `find` the source of `current_call_site`."""
    return _FINDER.bound(find)


def set_call_site(line: str | None) -> AbstractContextManager[Any]:
    """Makes `line` the current line."""
    return _FIXED.bound((line,))


def current_call_site() -> str | None:
    """Returns the current line of the user's code, or None if lines are not recorded."""
    find, fixed = _FINDER.innermost(), _FIXED.innermost()
    return None if find is None else fixed[0] if fixed else find()


def recording() -> bool:
    """Returns whether a program is being captured."""
    return bool(_FINDER)


def applying(applied: Applied) -> AbstractContextManager[Any]:
    """Makes ops that are recorded in the context part of an application."""
    return _APPLIED.bound(applied)


def current_application() -> Applied | None:
    """Returns the application that is being recorded, if any."""
    return _APPLIED.innermost()


T = TypeVar("T")


@runtime_checkable
class RematResults(Protocol):
    """Keeper of results of transfers: `remat` with a policy, for example."""

    def transfer(self, name: str, run: Callable[[], Tensor]) -> Tensor:
        """Returns the result of a transfer: `run()`, or the result that was kept."""
        ...

    def run_as_one(self, run: Callable[[], T]) -> T:
        """Returns `run()`. The transfers inside belong to the returned tensor, or to the first of several."""
        ...


_KEEPER = core.Ambient[RematResults]("a keeper of results of transfers", by_thread=True)


def keep_remat_results(keeper: RematResults) -> AbstractContextManager[RematResults]:
    """Shows the transfers of this thread to a keeper, which passes transfers on to `current_remat_results`."""
    return _KEEPER.bound(keeper)


def current_remat_results() -> RematResults | None:
    """Returns the keeper that sees the transfers now."""
    return _KEEPER.innermost()


def transferred(name: str, run: Callable[[], Tensor]) -> Tensor:
    """Returns the result of a transfer."""
    keeper = _KEEPER.innermost()
    return run() if keeper is None else keeper.transfer(name, run)


def as_one(run: Callable[[], T]) -> T:
    """Returns the value of a collective that is made of transfers and other operations."""
    keeper = _KEEPER.innermost()
    return run() if keeper is None else keeper.run_as_one(run)


def join_transfers(f: Callable[..., T]) -> Callable[..., T]:
    """Returns a function made of transfers as a single collective."""

    @functools.wraps(f)
    def one(*args: Any) -> T:
        return as_one(functools.partial(f, *args))

    return one


_NUMBERS = itertools.count(1)
# The primitives that send nothing.
_SILENT = ("pvary", "take_own_block")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Application of a primitive: everything but the tensors.

    Attributes:
        name: a key of `PRIMITIVES`.
        line: the ranks that take part.
        dim: the tensor dim that is cut or joined (`all_to_all`: cut).
        size: the global size along `dim`.
        concat_dim: `all_to_all`: the dim that is joined.
        concat_size: the global size along `concat_dim`.
        perm: `ppermute`: pairs (source index, destination index).
        bits: `quantized_all_gather`: bits of an element on the wire.
        block: `quantized_all_gather`: number of elements with a common scale.
        looks: `ragged_places`: dtype and shape of the rows, in words, for comparison between ranks.
        batch_dims: leading dims that vmap has added.
        number: number of the application in a captured program.
        transposes: the number of the transposed application, or 0 without a transposed application.
    """

    name: str
    line: AxisGroup
    dim: int = 0
    size: int = 0
    concat_dim: int = 0
    concat_size: int = 0
    perm: tuple[tuple[int, int], ...] = ()
    bits: int = 8
    block: int = 256
    looks: str = ""
    batch_dims: int = 0
    number: int = dataclasses.field(default_factory=_NUMBERS.__next__)
    transposes: int = 0


Wait = Callable[[], Tensor]


Operands = tuple[Tensor, ...]


class Primitive(NamedTuple):
    """Row of the table.

    Attributes:
        impl: the wire: a function of the tensor, the call and the operands.
        transpose: the call that is the transpose of a call.
        tangent: the call that maps tangents.
        start: function that starts the wire. `impl` waits for the result. None if no caller overlaps work.
        turned: function from the operands of a call to those of its transpose.
    """

    impl: Callable[..., Tensor]
    transpose: Callable[[Call], Call]
    tangent: Callable[[Call], Call] = lambda call: call
    start: Callable[[Tensor, Call], Wait] | None = None
    turned: Callable[[Operands], Operands] = lambda operands: operands


def bind(x: Tensor, call: Call, *operands: Tensor) -> Tensor:
    """Applies `call` to `x`, differentiably. A tensor subclass may intercept the call by `__torch_function__`.

    Args:
        x: the tensor in which the primitive is linear.
        call: the numbers and names that a graph holds as constants.
        operands: integer tensors that the primitive reads, such as sizes that are data, without derivatives. Under vmap
            each operand has `call.batch_dims` leading dims, of size 1 where the operand is not batched.
    """
    if has_torch_function_unary(x) or began():
        return handle_torch_function(bind, (x, *operands), x, call, *operands)
    if call.name == "psum" and not x.requires_grad and not recording() and not _is_transforming():
        # As in sums of a step: a Function costs more than the sum.
        return transferred("psum", lambda: PRIMITIVES["psum"].impl(x, call))
    return _Collective.apply(x, call, *operands)


def _is_transforming() -> bool:
    """Returns whether tensors may be wrapped: inside torch.func or forward-mode AD."""
    return peek_interpreter_stack() is not None or forward_level() >= 0


def start(x: Tensor, call: Call) -> Wait:
    """Starts `bind` without derivatives. `x` must not be written until the wait.

    On all ranks of the line, calls are started and waited for in the same order.
    """
    row = PRIMITIVES[call.name]
    if row.start is not None:
        return row.start(x, call)
    out = row.impl(x, call)
    return lambda: out


def transposed(call: Call) -> Call:
    """Returns the call whose result pairs with cotangents as `call`'s operand pairs with values.

    `<A x, y> = <x, A^T y>`.
    """
    return PRIMITIVES[call.name].transpose(call)


class _Collective(torch.autograd.Function):
    """Differentiable function behind every primitive, closed under backward, jvp and vmap."""

    @staticmethod
    def forward(x: Tensor, call: Call, *operands: Tensor) -> Tensor:
        if call.name in _SILENT:
            return _apply_call(x, call, *operands)
        return transferred(call.name, lambda: _apply_call(x, call, *operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.call, *operands = inputs
        ctx.line, ctx.program = current_call_site(), core.this_program()
        if operands:
            core.save_tensors(ctx, *operands)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        with core.adopted(ctx.program), set_call_site(ctx.line):
            call = dataclasses.replace(transposed(ctx.call), number=next(_NUMBERS), transposes=ctx.call.number)
            out = bind(grad_outputs[0], call, *PRIMITIVES[ctx.call.name].turned(operands))
        return out, None, *(None for _ in operands)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> Tensor:
        transposed(ctx.call)  # refuses a nonlinear primitive
        tangent = grad_inputs[0]
        assert tangent is not None
        return bind(tangent, PRIMITIVES[ctx.call.name].tangent(ctx.call), *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        x, call, *operands = args
        x_dim, _, *dims = in_dims
        batched = dataclasses.replace(
            call, dim=call.dim + 1, concat_dim=call.concat_dim + 1, batch_dims=call.batch_dims + 1
        )
        first = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        rest = [o.unsqueeze(0) if dim is None else o.movedim(dim, 0) for o, dim in zip(operands, dims, strict=True)]
        return bind(first, batched, *rest), 0


def _apply_call(x: Tensor, call: Call, *operands: Tensor) -> Tensor:
    impl = PRIMITIVES[call.name].impl
    if not recording():
        return impl(x, call, *operands)
    with applying(Applied(call.name, call.line.axes, call.number, call.transposes)):
        return impl(x, call, *operands)


# psum: V -> I


def _run_psum(x: Tensor, call: Call) -> Tensor:
    return native.all_reduce(x, call.line, "sum", name="psum")


# pvary: I -> V


def _run_pvary(x: Tensor, call: Call) -> Tensor:
    # A graph has an op here: a view would look like any other view, without axes.
    return torch.ops.shardfn.pvary(x, ",".join(call.line.axes)) if recording() else x.view_as(x)


# pmax: V -> I


def _run_pmax(x: Tensor, call: Call) -> Tensor:
    if not x.is_floating_point():
        return native.all_reduce(x, call.line, "max", name="pmax")
    # Backends differ in the maximum of NaN and a number. Floats are sent as integers of the same order, with NaN on
    # top.
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    bits = wide.masked_fill(wide.isnan(), torch.nan).view(torch.int64 if wide.itemsize == 8 else torch.int32)
    top = native.all_reduce(_order_bits(bits), call.line, "max", name="pmax")
    return _order_bits(top).view(wide.dtype).to(x.dtype)


def _order_bits(bits: Tensor) -> Tensor:
    """Returns the bits of floats as integers in the same order. The same function is the way back."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> info.bits - 1) & info.max)


# all_gather: V -> V, all_gather_invariant: V -> I


def _run_all_gather(x: Tensor, call: Call) -> Tensor:
    return _start_all_gather(x, call)()


def _start_all_gather(x: Tensor, call: Call) -> Wait:
    lengths = call.line.lengths(call.size)
    rows = _pad_rows(x.movedim(call.dim, 0), lengths[0])
    wait = native.all_gather_start(rows, call.line)
    return lambda: _join_rows(wait(), lengths).movedim(0, call.dim).contiguous()


# quantized_all_gather: V -> V


def _quantized_all_gather(x: Tensor, call: Call) -> Tensor:
    lengths, batch = call.line.lengths(call.size), x.shape[: call.batch_dims]
    rows = _pad_rows(x.movedim(call.dim, 0), lengths[0])
    # The members of a batch share no scales: each member is rounded as without the batch.
    flat = rows.movedim(0, call.batch_dims).reshape(batch.numel(), -1)
    codes = kernels.quantize(flat, bits=call.bits, block=call.block)
    gathered = gather_rows([codes], call.line)()[0] if flat.numel() else codes
    each = (call.line.size, *batch, lengths[0], *rows.shape[1 + call.batch_dims :])
    values, scales = gathered
    wide = kernels.dequantize(values, scales, flat.shape[1], bits=call.bits, block=call.block, dtype=x.dtype)
    blocks = (wide if flat.numel() else x.new_empty(each)).view(each).movedim(1 + call.batch_dims, 1)
    return _join_rows(blocks, lengths).movedim(0, call.dim).contiguous()


# psum_scatter: V -> V


def _psum_scatter(x: Tensor, call: Call) -> Tensor:
    lengths = call.line.lengths(call.size)
    blocks = _cut_rows(x.movedim(call.dim, 0), lengths)
    own = native.reduce_scatter(blocks, call.line, name="psum_scatter")
    return own[: lengths[call.line.index]].movedim(0, call.dim).contiguous()


# take_own_block: I -> V


def copy_own_block(x: Tensor, call: Call) -> Tensor:
    """Returns this rank's block, as a copy, so that the block does not keep the whole alive."""
    lengths, index = call.line.lengths(call.size), call.line.index
    return x.narrow(call.dim, sum(lengths[:index]), lengths[index]).clone(memory_format=torch.contiguous_format)


# all_to_all: V -> V


def _run_all_to_all(x: Tensor, call: Call) -> Tensor:
    return _start_all_to_all(x, call)()


def _start_all_to_all(x: Tensor, call: Call) -> Wait:
    line, rows = call.line, call.line.lengths(call.size)
    arriving = [_arriving_shape(x, call, width) for width in line.lengths(call.concat_size)]
    per_row = x.numel() // max(x.shape[call.dim], 1)
    send, recv = [r * per_row for r in rows], [shape.numel() for shape in arriving]
    wait = native.exchange_start(x.movedim(call.dim, 0).reshape(-1), send, recv, line, name="all_to_all")

    def join_arrived() -> Tensor:
        pairs = zip(wait().split(recv), arriving, strict=True)
        return torch.cat([block.view(shape).movedim(0, call.dim) for block, shape in pairs], call.concat_dim)

    return join_arrived


def _arriving_shape(x: Tensor, call: Call, width: int) -> torch.Size:
    """Returns the shape, cut dim first, of the block from a rank that holds `width` of `concat_dim`."""
    shape = list(x.shape)
    shape[call.concat_dim] = width
    shape[call.dim] = call.line.lengths(call.size)[call.line.index]
    return torch.Size([shape.pop(call.dim), *shape])


# ppermute: V -> V


def _run_ppermute(x: Tensor, call: Call) -> Tensor:
    return _start_ppermute(x, call)()


def _start_ppermute(x: Tensor, call: Call) -> Wait:
    line, n = call.line, x.numel()
    send = [n * ((line.index, i) in call.perm) for i in range(line.size)]
    recv = [n * ((i, line.index) in call.perm) for i in range(line.size)]
    wait = native.exchange_start(x.reshape(-1)[: sum(send)], send, recv, line, name="ppermute")

    def take_arrived() -> Tensor:
        out = wait()
        return out.view(x.shape) if sum(recv) else x.new_zeros(x.shape)

    return take_arrived


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x


def _cut_rows(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Returns the blocks of `x` along dim 0, padded to the first block's length and stacked."""
    if x.shape[0] == len(lengths) * lengths[0]:
        return x.reshape(len(lengths), lengths[0], *x.shape[1:])
    return torch.stack([_pad_rows(block, lengths[0]) for block in x.split(lengths)])


def _join_rows(blocks: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Returns the transpose of `_cut_rows`: stacked padded blocks to rows."""
    if len(set(lengths)) == 1:
        return blocks.flatten(0, 1)
    return torch.cat([block[:rows] for block, rows in zip(blocks.unbind(0), lengths, strict=True)])


def _make_call_map(name: str) -> Callable[[Call], Call]:
    return lambda call: dataclasses.replace(call, name=name)


def swap_dims(call: Call) -> Call:
    """Returns the call that cuts where a call joins."""
    return dataclasses.replace(
        call, dim=call.concat_dim, size=call.concat_size, concat_dim=call.dim, concat_size=call.size
    )


def _invert_permutation(call: Call) -> Call:
    return dataclasses.replace(call, perm=tuple((dst, src) for src, dst in call.perm))


def no_transpose(call: Call) -> Call:
    """Refuses the transpose of a primitive that is not linear."""
    raise NotImplementedError(
        f"{call.name} has no derivative. Where the result is a constant of the mathematics, as the shift of a softmax"
        f" is, detach it: `{call.name}(x.detach(), axis)`."
    )


PRIMITIVES: dict[str, Primitive] = {
    "psum": Primitive(_run_psum, _make_call_map("pvary")),
    "pvary": Primitive(_run_pvary, _make_call_map("psum")),
    "pmax": Primitive(_run_pmax, no_transpose),
    "all_gather": Primitive(_run_all_gather, _make_call_map("psum_scatter"), start=_start_all_gather),
    "psum_scatter": Primitive(_psum_scatter, _make_call_map("all_gather")),
    "quantized_all_gather": Primitive(
        _quantized_all_gather, _make_call_map("psum_scatter"), _make_call_map("all_gather")
    ),
    "all_gather_invariant": Primitive(_run_all_gather, _make_call_map("take_own_block"), start=_start_all_gather),
    "take_own_block": Primitive(copy_own_block, _make_call_map("all_gather_invariant")),
    "all_to_all": Primitive(_run_all_to_all, swap_dims, start=_start_all_to_all),
    "ppermute": Primitive(_run_ppermute, _invert_permutation, start=_start_ppermute),
}
