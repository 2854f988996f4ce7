"""Publishers without a broker. A receiver's client is imported only if its module is
used.
"""

from __future__ import annotations
