from __future__ import annotations

from django_tenants.models import DomainMixin, TenantMixin


class Shop(TenantMixin):
    pass


class Domain(DomainMixin):
    pass
