"""What the guarantees cost: real servers and real load, this package beside an
unprotected view and other packages.
"""

from __future__ import annotations
