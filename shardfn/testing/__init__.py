"""Ranks for tests of sharded code."""

from ._distributed import distributed as distributed
from ._pool import worker_setup as worker_setup
from ._parity import RTOL as RTOL, Run as Run, assert_opened as assert_opened
from ._parity import assert_parity as assert_parity, assert_same as assert_same
from ._parity import on_mesh as on_mesh, one_device as one_device, shard_rows as shard_rows
from ._buckets import assert_bucket_invariant as assert_bucket_invariant
from ._derivatives import assert_derivative_parity as assert_derivative_parity
from ._odd import ODD_TRAINABLE as ODD_TRAINABLE, odd_batch as odd_batch, odd_loss as odd_loss
from ._odd import odd_params as odd_params
