"""``{% load idempotency %}``: the form field for a key, and filters for what clients
sent and for times.
"""

from __future__ import annotations

from django import template
from django.template import Context
from django.utils.html import format_html
from django.utils.safestring import SafeString

from django_idempotency.forms import FIELD, new_form_key
from django_idempotency.middleware import SHOWS_KEY
from django_idempotency.values.printable import printable, zone

register = template.Library()
register.filter("printable", printable)
register.filter("zone", zone)


@register.simple_tag(takes_context=True)
def idempotency_key(context: Context) -> SafeString:
    """Render a hidden field with a new, signed key. Put it inside ``<form>``, beside
    ``{% csrf_token %}``.
    """
    if (request := getattr(context, "request", None)) is not None:
        setattr(request, SHOWS_KEY, True)
    return format_html(
        '<input type="hidden" name="{}" value="{}">', FIELD, new_form_key()
    )
