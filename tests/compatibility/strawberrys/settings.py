from __future__ import annotations

from tests.compatibility.settings import *
