"""The code on the page for API consumers, as it stands there, against the real server
and through lost responses.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields

import pytest

from django_idempotency.contrib.client import Retries
from tests.support.pages import FENCE, rows, section, text

pytestmark = pytest.mark.server

BLOCKS = FENCE.findall(text("client_code.md"))
PYTHON = [block for language, block in BLOCKS if language == "python"]


@pytest.fixture
def as_shown(relay, reference):
    """The code, with the address, the token and the reference of this test, and with
    patience for a busy server; its first two responses get lost.
    """
    relay.plan = ["lose", "cut"]
    real = {
        "https://api.example.com": relay.url,
        "secret-token": "alice-token",
        "order-1": reference,
        "timeout=10": "timeout=100",
        "--max-time 10": "--max-time 100",
        "timeout(10_000)": "timeout(100_000)",
    }

    def shown(block):
        for example, here in real.items():
            block = block.replace(example, here)
        return block

    return shown


def only(language):
    (block,) = [block for name, block in BLOCKS if name == language]
    return block


def charged_once(relay, server, reference, told):
    assert json.loads(told)["reference"] == reference
    assert (len(relay.keys), len(set(relay.keys)), server.ledger(reference)) == (
        3,
        1,
        1,
    )
    assert relay.keys[0].startswith('"')


@pytest.mark.parametrize("block", PYTHON, ids=["httpx", "requests", "plain"])
def test_python_charges_once(as_shown, relay, server, reference, block):
    names = {}
    exec(compile(as_shown(block), "client_code.md", "exec"), names)
    response = names["charge"](500, reference)
    assert response.status_code == 201
    for name in ("client", "session"):
        if name in names:
            names[name].close()
    charged_once(relay, server, reference, response.text)


@pytest.mark.curl
def test_curl_charges_once(as_shown, relay, server, reference):
    typed = (
        as_shown(only("console"))
        .removeprefix("$ ")
        .strip()
        .replace("8e03978e-40d5-43dd", reference[:18])
    )
    done = subprocess.run(
        f"{typed} --silent --noproxy '*'",
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done
    # What of a body had arrived before it broke was printed before the retry.
    told = done.stdout[done.stdout.rindex("{") :]
    charged_once(relay, server, reference, told)


@pytest.mark.node
def test_javascript_charges_once(as_shown, relay, server, reference, tmp_path):
    script = tmp_path / "charge.mjs"
    script.write_text(
        as_shown(only("javascript"))
        + f"console.log((await charge(500, '{reference}')).body);\n"
    )
    done = subprocess.run(["node", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    charged_once(relay, server, reference, done.stdout)


def test_the_options_of_retries_are_those_listed():
    table = rows(section("client_code.md", "In Python, with this package"))
    listed = {
        name.strip("`"): eval(default.strip("`")) for name, default, _meaning in table
    }
    assert listed == {field.name: field.default for field in fields(Retries)}
