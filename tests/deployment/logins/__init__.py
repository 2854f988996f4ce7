"""A project whose logins django-axes and django-otp watch over: a key must not blind them."""
