from __future__ import annotations

from importlib.util import find_spec

from django.apps import apps
from django.conf import settings
from django.contrib import admin
from django.contrib.staticfiles.views import serve
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView
from rest_framework.routers import SimpleRouter

from testproject import api, hooks, views

router = SimpleRouter()
router.register("api/charges", api.ChargeViewSet, basename="charge")
router.register("api/transfers", api.TransferViewSet, basename="transfer")
router.register("api/payouts", api.PayoutViewSet, basename="payout")
router.register("legacy/api/refunds", api.RefundViewSet, basename="refund")

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("", include(router.urls)),
    path("api/ledger/", api.LedgerView.as_view()),
    path("api/gateway/", api.GatewayView.as_view()),
    path("api/schema/", SpectacularAPIView.as_view()),
    path("api/hooks/gateway/", hooks.GatewayHook.as_view()),
    path("orders/", views.order),
    path("orders/new/", views.new_order, name="new-order"),
    path("async/orders/", views.async_order),
    path("legacy/refunds/", views.refund),
    path("admin/", admin.site.urls),
    # Whatever DEBUG is, because no web server in front serves the files.
    path("static/<path:path>", serve, {"insecure": True}),
]
if find_spec("django_idempotency.contrib"):  # which can be deleted
    from testproject.protocols import urlpatterns as of_protocols

    urlpatterns += of_protocols

    from testproject.operations import OperationStatusView

    status = OperationStatusView.as_view()
    urlpatterns += [
        path("api/operations/", status),
        path("api/operations/<uuid:id>/", status, name="idempotency-operation"),
    ]
if apps.is_installed("django_idempotency.contrib.openapi"):
    from django_idempotency.contrib.openapi.published_policy import PublishedPolicyView

    urlpatterns.append(path("api/policy/", PublishedPolicyView.as_view()))
if apps.is_installed("django_idempotency.contrib.operations"):
    from testproject.imports import ImportView

    urlpatterns.append(path("api/imports/", ImportView.as_view()))
if "prometheus" in settings.INSTRUMENTATION:
    from django_idempotency.instrumentation.prometheus import scrape

    urlpatterns.append(path("metrics/", scrape))
