"""Where events go: one module a broker, each importing its client only when it is used."""

from __future__ import annotations
