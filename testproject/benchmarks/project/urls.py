from __future__ import annotations

from django.urls import path

from testproject.benchmarks.project.settings import contender
from testproject.benchmarks.project.views import EffectView

urlpatterns = [path("effects/", contender.protect(EffectView))]
