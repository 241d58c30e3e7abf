"""Linear layers whose rows do not depend on one another's number."""

from ._api import PANEL as PANEL, pack_rows as pack_rows, row_linear as row_linear
from ._reference import joined as joined
