"""The benchmark compares versions of this package with each other, within the hour that it may take."""

from __future__ import annotations

import zipfile
from contextlib import closing
from http.client import HTTPConnection

import pytest

from testproject.benchmarks.servers import ROOT

OLD = "Idempotent-Replayed-By-Old"


@pytest.fixture
def wheel(tmp_path):
    """This package as of another version, which names the header of its replays differently."""
    file = tmp_path / "django_idempotency-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path in (ROOT / "django_idempotency").rglob("*.*"):
            content = path.read_bytes().replace(b'"Idempotent-Replayed"', f'"{OLD}"'.encode())
            archive.writestr(str(path.relative_to(ROOT)), content)
    return str(file)


def replay(server):
    with closing(HTTPConnection("127.0.0.1", server.port)) as connection:
        for _request in range(2):
            connection.request(
                "POST",
                "/effects/",
                '{"amount": 1, "currency": "eur"}',
                {"Content-Type": "application/json", "Idempotency-Key": "k"},
            )
            response = connection.getresponse()
            response.read()
        assert response.status == 201
        return dict(response.headers)


@pytest.mark.postgresql
@pytest.mark.server
def test_an_older_version_serves_beside_this_one(cluster, wheel, tmp_path, monkeypatch):
    from testproject.benchmarks import contenders, servers, versions

    monkeypatch.setattr(servers, "DIRECTORY", tmp_path)
    name = versions.unpack_beside_project(wheel, tmp_path / "versions")
    this, old = contenders.with_versions(["unprotected", "lock"], [name])[1:]
    assert contenders.load(old).title == "ours, atomic, claims by lock, django_idempotency-0.0.1-py3-none-any"
    for contender in (this, old):
        servers.prepare(contender, cluster, None, tmp_path)
        with servers.running(contender, cluster, None, tmp_path, workers=1, threads=1) as server:
            assert (OLD in replay(server)) is (contender == old)


@pytest.mark.parametrize("version", ["no-such-commit", "missing.whl"])
def test_a_version_that_there_is_not_is_named(version, tmp_path):
    from testproject.benchmarks import versions

    with pytest.raises(versions.NoSuchVersion):
        versions.unpack(version, tmp_path, "django_idempotency")


def test_comparing_all_contenders_takes_half_an_hour():
    from testproject.benchmarks.benchmark import Plan

    assert Plan().seconds_of_comparing < 31 * 60
