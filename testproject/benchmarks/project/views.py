from __future__ import annotations

import time
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from testproject.benchmarks.project.models import Effect


class EffectView(APIView):
    """Does as many milliseconds of work as the query asks for, then one INSERT;
    responds with about 200 bytes.
    """

    def post(self, request: Request) -> Response:
        if work := request.GET.get("work"):
            time.sleep(int(work) / 1000)
        order: Any = request.data
        effect = Effect.objects.create(
            key=request.headers["Idempotency-Key"], amount=order["amount"]
        )
        return Response(
            {
                "id": effect.pk,
                "object": "effect",
                "key": effect.key,
                "amount": effect.amount,
                "currency": order["currency"],
                "status": "succeeded",
                "created_at": effect.created_at,
                "livemode": False,
            },
            status=201,
        )
