"""Adam's step: along the mean of gradients, divided by the root of the mean of squared gradients."""

from ._api import preconditioned_step as preconditioned_step, preconditioned_step_ as preconditioned_step_
