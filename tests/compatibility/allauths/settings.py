from __future__ import annotations

from tests.compatibility.settings import *

INSTALLED_APPS = [
    *INSTALLED_APPS,
    "django.contrib.messages",
    "allauth",
    "allauth.account",
    "allauth.headless",
]
MIDDLEWARE = [
    *MIDDLEWARE,
    "django.contrib.messages.middleware.MessageMiddleware",
    "allauth.account.middleware.AccountMiddleware",
]
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_RATE_LIMITS = False
HEADLESS_CLIENTS = ("app",)
