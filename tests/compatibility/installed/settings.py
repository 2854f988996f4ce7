"""The packages that the project's own development environment has, all at once."""

from __future__ import annotations

from corsheaders.defaults import default_headers

from tests.compatibility.settings import *

INSTALLED_APPS += [
    *(
        "axes",
        "corsheaders",
        "django_otp",
        "django_otp.plugins.otp_static",
        "django_prometheus",
    ),
    *("drf_spectacular", "rest_framework", "django_idempotency.contrib.openapi"),
]
MIDDLEWARE = [
    "django_prometheus.middleware.PrometheusBeforeMiddleware",
    "corsheaders.middleware.CorsMiddleware",
    *MIDDLEWARE[:-1],
    "django_otp.middleware.OTPMiddleware",
    "axes.middleware.AxesMiddleware",
    "django_prometheus.middleware.PrometheusAfterMiddleware",
    MIDDLEWARE[-1],
]
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesBackend",
    "django.contrib.auth.backends.ModelBackend",
]
OTP_STATIC_THROTTLE_FACTOR = 600  # seconds; 1 is over before a slow request is
AXES_FAILURE_LIMIT = 3
AXES_VERBOSE = False
CORS_ALLOWED_ORIGINS = ["https://shop.example"]
CORS_ALLOW_HEADERS = [*default_headers, "idempotency-key"]
CORS_EXPOSE_HEADERS = ["Idempotent-Replayed", "Retry-After", "X-Should-Retry"]
REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema"}
