"""docs/consumers/queues.md: the jobs on the page run once in the workers of each queue,
however often they are enqueued.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType
from uuid import uuid4

import pytest
from django.db import connections

from django_idempotency import signals
from tests.support.callers import heard
from tests.support.pages import FENCE, section

pytestmark = [pytest.mark.queues, pytest.mark.usefixtures("transactional_db")]
PAGE = "consumers/queues.md"
TIMES = 3


@contextmanager
def jobs_of(queue):
    """The module that the page shows, which workers can import, and a count of runs."""
    ((_language, block),) = FENCE.findall(section(PAGE, queue))
    module = sys.modules[f"page_{queue}"] = ModuleType(f"page_{queue}")
    exec(compile(block, PAGE, "exec", dont_inherit=True), vars(module))
    with heard(signals.key_completed) as runs:
        yield module
    del sys.modules[module.__name__]
    assert [(run["operation"].key, run["response"].body) for run in runs] == [
        ("receipt-7", b'{"sent": 7}')
    ]


@pytest.mark.redis
def test_jobs_of_rq(redis_url):
    from redis import Redis
    from rq import Queue, SimpleWorker

    with jobs_of("RQ") as page, Redis.from_url(redis_url) as redis:
        queue = Queue(f"tests-{uuid4()}", connection=redis)
        for _time in range(TIMES):
            page.order_paid(queue, 7)
        jobs = queue.jobs
        SimpleWorker([queue], connection=redis).work(burst=True)
        assert [job.return_value() for job in jobs] == [{"sent": 7}] * TIMES
        queue.delete()


def test_jobs_of_huey():
    with jobs_of("huey") as page:
        results = [page.send_receipt(7) for _time in range(TIMES)]
        while (task := page.huey.dequeue()) is not None:
            page.huey.execute(task)
        assert [result.get() for result in results] == [{"sent": 7}] * TIMES


def test_jobs_of_dramatiq():
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    class Closing(dramatiq.Middleware):
        def after_process_message(self, *_args, **_named):
            connections.close_all()

    broker = StubBroker()
    broker.add_middleware(Closing())
    dramatiq.set_broker(broker)
    with jobs_of("dramatiq") as page:
        for _time in range(TIMES):
            page.send_receipt.send(7)
        worker = dramatiq.Worker(broker, worker_timeout=100)
        worker.start()
        broker.join(page.send_receipt.queue_name)
        worker.join()
        worker.stop()
        assert broker.dead_letters == []


def test_jobs_of_procrastinate(monkeypatch):
    from procrastinate import App
    from procrastinate.testing import InMemoryConnector

    app = App(connector=InMemoryConnector())
    monkeypatch.setattr("procrastinate.contrib.django.app", app)
    with jobs_of("procrastinate") as page:
        function = page.send_receipt.func

        def closing(**arguments):
            try:
                return function(**arguments)
            finally:
                connections.close_all()

        page.send_receipt.func = closing
        for _time in range(TIMES):
            page.send_receipt.defer(order_id=7)
        app.run_worker(wait=False)
        assert {job["status"] for job in app.connector.jobs.values()} == {"succeeded"}
