"""What a captured step is: a graph of aten ops and transfers; passes over it, analysis, back ends."""

from ._options import Schedule as Schedule, Compiled as Compiled, compile_graph as compile_graph, resolve_backend as resolve_backend

from ._device import Cluster as Cluster
CostAnalysis = MemoryAnalysis = Estimate = object
as_text = memory_analysis = cost_analysis = estimate = None
from ._check import collective_sequence as collective_sequence, compare_sequences as compare_sequences, prove_no_hang as prove_no_hang
