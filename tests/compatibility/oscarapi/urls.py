from __future__ import annotations

from functools import cache

from django.conf import settings
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import include, path
from oscar.core.loading import get_model

from tests.compatibility.project import Project, ask

Basket, Order = get_model("basket", "Basket"), get_model("order", "Order")
Product, ProductClass = (
    get_model("catalogue", "Product"),
    get_model("catalogue", "ProductClass"),
)
Partner, StockRecord = (
    get_model("partner", "Partner"),
    get_model("partner", "StockRecord"),
)
CSRF_TOKEN = "t" * 32


class OscarApi(Project):
    """The checkout of a basket for each reference."""

    path = "/api/checkout/"
    paid = 200
    effect = Order
    books = False  # a checkout is validated before it writes

    def begin(self):
        carol = get_user_model().objects.create_user("carol")
        client = Client()
        client.force_login(carol)
        self.session = client.cookies[settings.SESSION_COOKIE_NAME].value
        kind = ProductClass.objects.create(name="e-book", requires_shipping=False)
        product = Product.objects.create(title="a book", product_class=kind)
        stock = {
            "partner_sku": "1",
            "price": 10,
            "price_currency": "GBP",
            "num_in_stock": 1000,
        }
        StockRecord.objects.create(
            product=product, partner=Partner.objects.create(name="a shop"), **stock
        )
        self.basket = cache(self._fill_basket)

    def _fill_basket(self, _reference):
        # or the next request merges them
        Basket.objects.filter(status=Basket.OPEN).update(status=Basket.FROZEN)
        added = ask(
            "POST",
            "/api/basket/add-product/",
            {"url": self._product(), "quantity": 1},
            **self.headers(),
        )
        assert added.status_code == 200, added
        return added.json()["id"]

    def _product(self):
        return f"http://testserver/api/products/{Product.objects.get().pk}/"

    def headers(self):
        cookies = (
            f"{settings.SESSION_COOKIE_NAME}={self.session};"
            f" {settings.CSRF_COOKIE_NAME}={CSRF_TOKEN}"
        )
        return {"Cookie": cookies, "X-CSRFToken": CSRF_TOKEN}

    def body(self, reference, *, refuse):
        basket = f"http://testserver/api/baskets/{self.basket(reference)}/"
        return {"basket": basket, "total": "0.01" if refuse else "10.00"}

    def effects(self, reference):
        return Order.objects.filter(basket_id=self.basket(reference)).count()

    def check(self):
        self._fill_basket("r-line")
        line = {"url": self._product(), "quantity": 3}
        for key in ("line", "line", "another"):
            added = ask(
                "POST",
                "/api/basket/add-product/",
                line,
                **self.headers(),
                **{"Idempotency-Key": key},
            )
            assert added.status_code == 200, added
        (quantity,) = Basket.objects.get(status=Basket.OPEN).lines.values_list(
            "quantity", flat=True
        )
        assert quantity == 1 + 2 * 3
        assert StockRecord.objects.get().num_allocated == Order.objects.count()


PROJECTS = {"django-oscar-api": OscarApi()}
urlpatterns = [path("api/", include("oscarapi.urls"))]
