"""The afternoon with a project that nobody here wrote: openwisp-ipam, which gives out IP addresses.

Its distribution has its tests. None of its code is changed: one view gets the mixin in a subclass, as its documentation
advises for changes of views, and the middleware covers the others.
"""

from __future__ import annotations

import importlib

import pytest

from tests.deployment.test_afternoon import client_over_a_bad_network, dashboard
from tests.support.reader import reader_with_postgresql
from tests.support.requirements import ADOPTED
from tests.support.waiting import eventually

pytestmark = [pytest.mark.adopted, pytest.mark.openapi_client, pytest.mark.psycopg3, pytest.mark.postgresql]

# What openwisp-ipam's documentation and test project have.
SETTINGS = """# network/settings.py, at the end
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "openwisp_users.accounts",
    "django.contrib.sites",
    "allauth",
    "allauth.account",
    "allauth.socialaccount",
    "reversion",
    "openwisp_users",
    "openwisp_ipam",
    "openwisp_utils.admin_theme",
    "django.contrib.admin",
    "admin_auto_filters",
    "rest_framework",
    "rest_framework.authtoken",
    "drf_yasg",
]
MIDDLEWARE += ["allauth.account.middleware.AccountMiddleware"]
AUTH_USER_MODEL = "openwisp_users.User"
SITE_ID = 1
LANGUAGE_CODE = "en"
OPENWISP_USERS_AUTH_API = True
CELERY_BROKER_URL = "memory://"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "openwisp_utils.staticfiles.DependencyFinder",
]
TEMPLATES[0]["APP_DIRS"] = False
TEMPLATES[0]["OPTIONS"]["loaders"] = [
    "openwisp_utils.loaders.DependencyLoader",
    "django.template.loaders.app_directories.Loader",
]
TEMPLATES[0]["OPTIONS"]["context_processors"] += ["openwisp_utils.admin_theme.context_processor.menu_groups"]
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}}
"""
# What is ours.
PROTECTION = """# network/settings.py, at the end
INSTALLED_APPS += ["drf_spectacular", "django_idempotency", "django_idempotency.contrib.openapi"]
MIDDLEWARE += ["django_idempotency.middleware.IdempotencyMiddleware"]
REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema"}
SPECTACULAR_SETTINGS = {
    "SCHEMA_PATH_PREFIX": "/api/v1/ipam",
    "PREPROCESSING_HOOKS": ["network.views.published"],
}
"""
VIEWS = """# network/views.py
from django_idempotency.rest_framework import IdempotentMixin
from openwisp_ipam.api import views
from openwisp_ipam.api.views import *


class RequestIPView(IdempotentMixin, views.RequestIPView):
    pass


request_ip = RequestIPView.as_view()


def published(endpoints):
    return [endpoint for endpoint in endpoints if endpoint[0].endswith("/request-ip/")]
"""
URLS = """# network/urls.py
from django.contrib import admin
from django.urls import include, path
from openwisp_ipam.urls import get_urls
from openwisp_users.api.urls import get_api_urls
from network import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/v1/", include((get_api_urls(), "users"), namespace="users")),
    path("", include(get_urls(views))),
]
"""
PREPARE = """
from django.contrib.auth import get_user_model
from django.test import Client
from openwisp_ipam.models import Subnet
from rest_framework.authtoken.models import Token
admin = get_user_model().objects.create_superuser("admin", "admin@example.com", "secret")
client = Client()
client.force_login(admin)
token = Token.objects.create(user=admin)
print(client.session.session_key, token.key, Subnet.objects.create(name="office", subnet="10.0.0.0/24").pk)
"""
ADDRESSES = "from openwisp_ipam.models import IpAddress; print(*IpAddress.objects.values_list('ip_address', flat=True))"
DESCRIBE = "manage.py spectacular --format openapi-json --validate --fail-on-warn --file openapi.json"
# The test of the import fails on PostgreSQL without us too: it looks for a subnet with an empty address.
TWICE = (
    "-m pytest --pyargs openwisp_ipam.tests.test_api --ds network.settings -p no:cacheprovider -k not(import_subnet) "
    "--idempotency-twice=all"
)


def test_a_foreign_project_is_protected(tmp_path, db):
    with reader_with_postgresql(tmp_path, python=ADOPTED / "bin" / "python", path="") as someone:
        someone.warnings = "default"
        someone.type("$ django-admin startproject network .")
        for block in (SETTINGS, PROTECTION, VIEWS, URLS):
            someone.write(block)
        someone.type("$ python manage.py migrate\n$ python manage.py runserver")
        session, token, subnet = shell(someone, PREPARE)
        assert requested_over_a_bad_network(someone, token, subnet) == ["10.0.0.1"]
        assert "12 requests were sent twice; 0 differed" in someone.run(*TWICE.split())
        eventually(lambda: "<dd>66.67 %</dd>" in dashboard(someone, session), within=30, every=0.5)


def requested_over_a_bad_network(someone, token, subnet):
    """The addresses that are given out, after a generated client has lost two responses to its request for one."""
    someone.run(*DESCRIBE.split())
    with client_over_a_bad_network(someone, {"Authorization": f"Bearer {token}"}) as (package, client):
        wanted = importlib.import_module(f"{package}.models").IpRequest(subnet=subnet, description="a printer")
        create = importlib.import_module(f"{package}.api.subnet.subnet_request_ip_create")
        made = create.sync_detailed(subnet, client=client, body=wanted, idempotency_key='"charge-1"')
    assert (made.status_code, made.headers["Idempotent-Replayed"]) == (201, "true")
    return shell(someone, ADDRESSES)


def shell(someone, code):
    """The words of the last line that the code prints."""
    return someone.run("manage.py", "shell", "--verbosity", "0", "-c", code).splitlines()[-1].split()
