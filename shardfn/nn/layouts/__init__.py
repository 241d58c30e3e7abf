"""Layouts of block-sparse attention, made for a length: each block of queries attends to some blocks of keys.

    dense            every block
    fixed            a window, and the last blocks of every window
    variable         windows of several sizes, chosen global blocks, and random blocks
    bigbird          a sliding window, the first blocks, and random blocks
    bslongformer     a sliding window and chosen blocks
    local_window     a sliding window

Each layout is a function from the length to a `BlockLayout`. A `BlockLayout` composes with other masks by `&`. Inside
of a block every pair counts: "unidirectional" leaves out only later blocks, and a causal model attends by `Causal() &
layout`. A model knows no length, and takes the function itself, for example `functools.partial(layouts.fixed,
block=64)`.

A layout is made for a single length. The corner of a longer layout is another layout. Random blocks are a function of
the key and the head, so all ranks, and all resumed processes, draw the same blocks.
"""

from ._windows import num_blocks as num_blocks
from ._windows import dense as dense, fixed as fixed, variable as variable
from ._windows import bigbird as bigbird, bslongformer as bslongformer, local_window as local_window
