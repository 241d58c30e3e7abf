# pyright: reportPrivateImportUsage=false
"""torch's kernels for a list of leaves, one launch each. The names are private, so only this file uses the kernels."""

import torch

foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign = torch._foreach_sign
foreach_sqrt = torch._foreach_sqrt
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_
