"""django-oscar's shop by its REST API."""

from __future__ import annotations

from oscar.defaults import *

from tests.compatibility.settings import *

INSTALLED_APPS += [
    *(
        "django.contrib.sites",
        "django.contrib.flatpages",
        "django.contrib.messages",
        "oscar.config.Shop",
    ),
    "oscar.apps.address.apps.AddressConfig",
    "oscar.apps.analytics.apps.AnalyticsConfig",
    "oscar.apps.basket.apps.BasketConfig",
    "oscar.apps.catalogue.apps.CatalogueConfig",
    "oscar.apps.catalogue.reviews.apps.CatalogueReviewsConfig",
    "oscar.apps.checkout.apps.CheckoutConfig",
    "oscar.apps.communication.apps.CommunicationConfig",
    "oscar.apps.customer.apps.CustomerConfig",
    "oscar.apps.dashboard.apps.DashboardConfig",
    *(
        f"oscar.apps.dashboard.{name}.apps.{name.title()}DashboardConfig"
        for name in (
            *(
                "catalogue",
                "communications",
                "offers",
                "orders",
                "pages",
                "partners",
                "ranges",
                "reports",
                "reviews",
            ),
            *("shipping", "users", "vouchers"),
        )
    ),
    "oscar.apps.offer.apps.OfferConfig",
    "oscar.apps.order.apps.OrderConfig",
    "oscar.apps.partner.apps.PartnerConfig",
    "oscar.apps.payment.apps.PaymentConfig",
    "oscar.apps.search.apps.SearchConfig",
    "oscar.apps.shipping.apps.ShippingConfig",
    "oscar.apps.voucher.apps.VoucherConfig",
    "oscar.apps.wishlists.apps.WishlistsConfig",
    *(
        "widget_tweaks",
        "haystack",
        "treebeard",
        "django_tables2",
        "rest_framework",
        "oscarapi",
    ),
]
MIDDLEWARE.insert(-1, "oscarapi.middleware.ApiBasketMiddleWare")
HAYSTACK_CONNECTIONS = {
    "default": {"ENGINE": "haystack.backends.simple_backend.SimpleEngine"}
}
SITE_ID = 1
OSCAR_INITIAL_ORDER_STATUS = "new"
IDEMPOTENCY = {}
