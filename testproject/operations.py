"""What became of an operation: its status, and its receipt."""

from __future__ import annotations

from rest_framework.views import APIView

from django_idempotency.contrib.operations.status import OperationStatus


class OperationStatusView(OperationStatus, APIView):
    """Show what became of one of the caller's keys, without sending the request
    again.
    """
