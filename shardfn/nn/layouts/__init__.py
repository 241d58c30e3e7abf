"""Layouts of block-sparse attention: the blocks of keys that each block of queries attends to, made for a length.

    dense            every block
    fixed            a window of its own, and the last blocks of every window
    variable         windows of several sizes, chosen blocks that all see, and random ones
    bigbird          a sliding window, the first blocks, and random ones
    bslongformer     a sliding window and chosen blocks
    local_window     a sliding window

Each is a function of the length that returns a `BlockLayout`, which composes with other masks by `&`. Inside a block
every pair counts: "unidirectional" leaves out later blocks only, and a causal model attends by `Causal() & layout`. A
model, which knows no length, takes the function itself: `functools.partial(layouts.fixed, block=64)`.

A layout is made for one length. The corner of a longer one is another layout. Random blocks are a function of the key
and the head, so that all ranks, and all processes that resume, draw the same.
"""

from ._parts import num_blocks as num_blocks
from ._windows import dense as dense, fixed as fixed, variable as variable
from ._sliding import bigbird as bigbird, bslongformer as bslongformer, local_window as local_window
