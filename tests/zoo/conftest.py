"""The modules beside the tests can be imported, here and in the ranks, which get this path."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
