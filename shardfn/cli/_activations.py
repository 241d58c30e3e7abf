"""Bytes of activations, stored by the forward for the backward, by formula.

A block keeps, for each token, the inputs of its products, norms and attention. In units of the element size: 4 D (two
norms: input and output) + 2 D + 2 G K (q, k, v, attention's output) + 2 F for gelu, 4 F for swiglu. The scores are not
kept (attention is fused). For 16-bit elements, G K = D and F = 4 D that is 32 D bytes: the 34 D of Korthikanti et al.
2022, arXiv 2205.05198, less the dropout masks, which add 2 D bytes where dropout is on. Tensor parallelism over t ranks
divides all but the 4 D and the masks. A rank of a pipeline stores the activations of the rank's blocks, for each open
microbatch of the schedule. The last rank has the logits as well. With experts F is the sum over a token's choices, in
the mean of the layers, and each choice has three rows of D: the input, the sorted input, and the result.
"""

import dataclasses
import math

from ._experts import mean_width, row_copies, widths
from ._pipeline import pipeline, stage_layers
from ._states import Setup

# Bytes a logit at the peak, in the backward of the loss: log softmax, its gradient and the logits' gradient, float32.
_LOGIT_BYTES = 12


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes of activations on a single rank.

    Attributes:
        saved: bytes stored for the backward, of all microbatches open at a time. Without a pipeline there is one.
        temporaries: largest number of further bytes in memory, for the loss over the vocabulary, or for a single block.
    """

    saved: int
    temporaries: int


def activation_bytes(setup: Setup) -> Activations:
    """Returns the activations on the rank with the most.

    With remat (activation checkpointing) a block stores only the input, and the activations of a single block at a time
    exist, in the block's backward.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("gpt2", parse_model("gpt2"), {"dp": 1}, cluster("h100"), Zero(), batch=1, seq=1024, remat=True)
        >>> activation_bytes(run).saved == (12 + 2) * 2 * 1024 * 768
        True
    """
    c, tokens, size = setup.config, setup.micro * setup.seq, setup.bytes_of.params
    block = tokens * _block_bytes(setup)
    ends = 2 * tokens * size * c.d_model  # the last norm's input and the output layer's
    logits = tokens * -(-c.vocab_size // setup.axis("tp")) * _LOGIT_BYTES
    widest = tokens * size * ((2 if c.mlp == "gelu" else 3) * -(-max(widths(c)) // setup.axis("tp")) + 2 * c.d_model)
    line, layers = pipeline(setup), stage_layers(setup)
    kept, busy = (tokens * size * c.d_model, block + widest) if setup.remat else (block, widest)
    per_chunk = layers // line.num_chunks * kept
    ranks = [Activations(held * per_chunk, busy) for held in line.held]
    # The model's end: on the first rank with stages that go down the ranks and up again.
    end = 0 if setup.schedule in ("zb-v", "dualpipe-v") else -1
    ranks[end] = Activations(ranks[end].saved + ends, max(logits, busy))
    return max(ranks, key=lambda a: a.saved + a.temporaries)


def _block_bytes(setup: Setup) -> int:
    """Returns the bytes that one block keeps for each token."""
    c, size = setup.config, setup.bytes_of.params
    features = math.ceil((2 if c.mlp == "gelu" else 4) * mean_width(c))
    heads, kv_heads = setup.heads_on_a_rank
    masks = 2 * c.d_model if c.dropout else 0
    rows = math.ceil(row_copies(c) * c.d_model)  # whole: tensor parallelism cuts the experts' features
    wide = 2 * (heads + kv_heads) * c.head_dim + -(-features // setup.axis("tp"))
    return size * (4 * c.d_model + rows + wide) + masks
