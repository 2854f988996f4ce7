from __future__ import annotations

from django_idempotency.contrib.sqs.publisher import SQSPublisher
from django_idempotency.contrib.sqs.runner import SQS, lambda_handler

__all__ = ["SQS", "SQSPublisher", "lambda_handler"]
