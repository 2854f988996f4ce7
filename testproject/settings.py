"""Settings of the payments service. Each ``env`` call reads an option, with its
default.
"""

from __future__ import annotations

import os
from pathlib import Path

from environ import Env

from django_idempotency import Atomic, Lease
from testproject import brokers, embedded

BASE_DIR = Path(__file__).resolve().parent.parent
env = Env()

DEBUG = env.bool("DEBUG", default=False)
SECRET_KEY = env.str(
    "SECRET_KEY", default="not-a-secret: this service moves no real money"
)
ALLOWED_HOSTS = ["*"]
HOST = env.str("HOST", default="127.0.0.1")
PORT = env.int("PORT", default=8000)
SIMULATE = env.bool("SIMULATE", default=False)
FAULTS_LOG = env.str("FAULTS_LOG", default="")
FAULTS_MAY_CRASH_DATABASE = env.bool("FAULTS_MAY_CRASH_DATABASE", default=False)
GATEWAY_PORT = env.int("GATEWAY_PORT", default=0)  # 0: any free one
GATEWAY_URL = env.str("GATEWAY_URL", default=f"http://127.0.0.1:{GATEWAY_PORT}")

if not env.str("DATABASE_URL", default=""):
    # In the environment, so that every process started from this one shares the
    # cluster.
    os.environ["DATABASE_URL"] = embedded.start(
        Path(
            env.str(
                "EMBEDDED_POSTGRES_DIR", default=str(BASE_DIR / ".embedded-postgres")
            )
        )
    )
DATABASES = {
    "default": {
        "CONN_MAX_AGE": env.int("CONN_MAX_AGE", default=0),
        "ATOMIC_REQUESTS": env.bool("ATOMIC_REQUESTS", default=False),
        **env.db("DATABASE_URL"),
    }
}
if REDIS_URL := env.str("REDIS_URL", default=""):
    CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": REDIS_URL,
        }
    }
# Where events go, and the queue, subject or topic of the events about charges.
BROKER_URL = env.str("BROKER_URL", default="")
CHARGE_TOPIC = env.str("CHARGE_TOPIC", default="charge.created")
CELERY_BROKER_URL = env.str("CELERY_BROKER_URL", default="memory://")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "rest_framework.authtoken",
    "drf_spectacular",
    "django_idempotency",
    "django_idempotency.contrib.audit",
    "django_idempotency.contrib.citus",
    "django_idempotency.contrib.dashboard",
    "django_idempotency.contrib.openapi",
    "django_idempotency.contrib.operations",
    "django_idempotency.contrib.outbox",
    "django_idempotency.contrib.partitions",
    "django_idempotency.contrib.steps",
    "testproject",
]
if not env.bool("OPENAPI", default=True):  # with Ninja it is half of the time to start
    INSTALLED_APPS.remove("django_idempotency.contrib.openapi")
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "testproject.authentication.token_authentication",
    "django_idempotency.middleware.IdempotencyMiddleware",
]
if SIMULATE and FAULTS_LOG:
    MIDDLEWARE.insert(0, "testproject.faults.faults")
INSTRUMENTATION = env.list("INSTRUMENTATION", default=[])
WORKERS = env.int("WORKERS", default=2)  # processes of make serve
# or "cached", "redis", both at REDIS_URL; or "citus"
STORE = env.str("STORE", default="database")
CLAIM = env.str("CLAIM", default="record")  # or "lock": of the views in atomic mode
STORES = {
    "database": {},
    "cached": {"default": {"BACKEND": "django_idempotency.contrib.cached.CachedStore"}},
    "redis": {
        "redis": {
            "BACKEND": "django_idempotency.contrib.redis.RedisStore",
            "OPTIONS": {"url": REDIS_URL},
        }
    },
    "citus": {
        "default": {"BACKEND": "django_idempotency.contrib.citus.store.CitusStore"}
    },
}[STORE]
# of the endpoints in lease mode
LEASE_STORE = "redis" if STORE == "redis" else "default"
# whether payouts are paid in steps, which only PostgreSQL can fence
STEPS = (
    "django_idempotency.contrib.steps" in INSTALLED_APPS
    and DATABASES["default"]["ENGINE"].endswith("postgresql")
    and STORE in ("database", "cached")
)
IDEMPOTENCY = {
    "STORES": STORES,
    "ATOMIC": Atomic(claim=CLAIM),
    # short enough to watch a crash in lease mode
    "LEASE": Lease(seconds=env.float("LEASE", default=20)),
    "INSTRUMENTATION": INSTRUMENTATION,
    "METRICS_TOKENS": env.list("METRICS_TOKENS", default=["token-for-prometheus"]),
    "OUTBOX": {
        "PUBLISHERS": brokers.publishers(BROKER_URL),
        "LONGEST_DELAY": 5,
        "MAX_ATTEMPTS": 1000,
    },
}

REST_FRAMEWORK = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.TokenAuthentication"
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
}

SPECTACULAR_SETTINGS = {
    "TITLE": "A small payments service",
    "DESCRIPTION": "The test project of django-idempotency.",
    "VERSION": "1.0.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
}

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "UTC"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    # refused requests are expected here
    "loggers": {"django.request": {"level": "ERROR"}},
}
