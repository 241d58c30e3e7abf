"""Reports of waits on stderr, as lines and progress bars."""

from ._waits import Wait as Wait, is_first as is_first, waiting as waiting
from ._waits import end_imports as end_imports, end_start as end_start
