"""What the guarantees cost: real servers, real load, this package beside an unprotected view and beside others."""

from __future__ import annotations
