"""`Schedule`: what the passes over a captured graph may do, as one value."""

import dataclasses

from torch.fx import GraphModule


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Temporary."""

    prefetch: int = 32 << 20
    bucket: int = 1 << 20
    reductions: int = 24 << 20
    budget: int | None = None

    def __call__(self, gm: GraphModule) -> GraphModule:
        """Temporary."""
        return gm


@dataclasses.dataclass
class Compiled:
    gm: GraphModule
    seconds: float = 0.0

    def __call__(self, *args):
        return self.gm(*args)


def compile_graph(gm, backend):
    return Compiled(gm)


def resolve_backend(b):
    return b or "graph"
