"""Publishers, one module for each broker. A broker's client is imported only if its module is used."""

from __future__ import annotations
