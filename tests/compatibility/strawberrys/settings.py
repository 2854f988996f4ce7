from __future__ import annotations

from tests.compatibility.settings import *

ROOT_URLCONF = "tests.compatibility.strawberrys.urls"
