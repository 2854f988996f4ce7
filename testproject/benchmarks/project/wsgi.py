from __future__ import annotations

import os
import sys

from django.core.wsgi import get_wsgi_application

if interval := os.environ.get("SWITCH_INTERVAL"):
    sys.setswitchinterval(float(interval))
application = get_wsgi_application()
