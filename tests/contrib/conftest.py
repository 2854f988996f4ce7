"""Fixtures that wings share with the core's tests."""

from __future__ import annotations

import pytest

from tests.messages.conftest import start_consumer

__all__ = ["start_consumer"]


@pytest.fixture(scope="session")
def sqs_account():
    """Options of ``boto3.client``, without an endpoint."""
    return {
        "region_name": "eu-west-1",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
    }


@pytest.fixture(scope="module")
def sqs_options(sqs_account):
    """Options of ``boto3.client`` for moto's server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"endpoint_url": f"http://{host}:{port}", **sqs_account}
    server.stop()
