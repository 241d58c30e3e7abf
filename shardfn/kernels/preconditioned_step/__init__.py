"""A step along a mean, divided by the root of a variance."""

from ._api import preconditioned_step as preconditioned_step, preconditioned_step_ as preconditioned_step_
