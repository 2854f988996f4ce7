"""Many deferred operations against the real service, while its web workers, the workers
of operations, sessions and PostgreSQL are killed, and hints are lost:

    python -m tests.contrib.operations.campaign --operations 2000 --minutes 25

Needs redis-server. PostgreSQL and Redis are servers of its own. Each client sends its
request until it is accepted, asks for the status until the operation is done, and sends
the request once more. Exits with an error if an operation is lost, has not one effect,
or was run before its 202 was committed. In the first half, workers look for themselves;
in the second, hints alone say what to run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import psycopg

from tests.support.waiting import eventually

SETTINGS = "tests.contrib.operations.hinted"
HINTS = "hints"  # the list in Redis
CLIENTS, WEB_WORKERS = 16, 3
WORKERS = ("poll", "poll", "read", "read", "sweep")
STRIKES = ("web", "worker", "session", "postgresql", "queue")  # methods of Campaign
PAUSES = 5, 30  # seconds between two strikes
PATIENCE = 900  # seconds in which an operation that was accepted is done
# An entry of the ledger without a record whose 202 is committed: nobody else sees
# another transaction's rows before.
GUARD = """
CREATE TABLE too_early (reference text);
CREATE FUNCTION note_early() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF NOT EXISTS (
    SELECT FROM django_idempotency_record WHERE key = NEW.reference
    AND status = 'completed' AND response_status = 202
  ) THEN INSERT INTO too_early VALUES (NEW.reference); END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER early BEFORE INSERT ON testproject_ledgerentry
FOR EACH ROW EXECUTE FUNCTION note_early()
"""
EARLY = """
INSERT INTO testproject_ledgerentry (id, kind, user_id, amount, currency, reference,
    created_at)
SELECT gen_random_uuid(), 'deposit', id, 1, 'EUR', 'early', now() FROM auth_user LIMIT 1
"""
TOO_EARLY = "SELECT reference FROM too_early"
EFFECTS = "SELECT reference, count(*) FROM testproject_ledgerentry GROUP BY reference"
LEFT = """
SELECT count(*) FROM django_idempotency_deferred_operation WHERE due_at IS NOT NULL
"""
RETRIED = """
SELECT count(*) FROM django_idempotency_record
WHERE key LIKE 'deferred:%' AND attempts > 1
"""
END_SESSION = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND datname = current_database()
    AND pid <> pg_backend_pid()
ORDER BY xact_start IS NULL, random() LIMIT 1
"""


def payment(reference):
    return {"amount": 5, "currency": "EUR", "reference": reference}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--seed", type=int, default=43)
    options = parser.parse_args()
    # No test may get at it.
    os.environ["DATABASE_URL"] = "postgres://nobody@127.0.0.1:1/none"
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    began = time.monotonic()
    with ground() as (cluster, node, directory):
        campaign = Campaign(cluster, node, options)
        outcomes = campaign.run(directory)
        violations = campaign.violations(outcomes)
        (retried,) = cluster.execute(RETRIED)
    print(
        f"{options.operations} operations in {time.monotonic() - began:.0f} s, seed"
        f" {options.seed}\nkills: {dict(campaign.struck)}; {campaign.lost} hints lost;"
        f" {campaign.workers.died} workers ended by themselves\nattempts: {retried}"
        f" operations took more than one\nviolations: {len(violations)}"
    )
    for violation in violations:
        print(violation)
    return 1 if violations else 0


@contextmanager
def ground():
    """A PostgreSQL and a Redis of the campaign's own, and a directory."""
    from tests.faults.cluster import room, running_cluster
    from tests.support.redis_servers import running_node

    with ExitStack() as stack:
        directory = stack.enter_context(room())
        cluster = running_cluster(directory, max_connections="200")
        node = running_node(directory)
        yield stack.enter_context(cluster), stack.enter_context(node), directory


class Workers:
    """Processes that are replaced when they end, as by a supervisor."""

    def __init__(self, environment, log):
        self.environment, self.log, self.died = environment, log, 0
        self.running = [(kind, self._start(kind)) for kind in WORKERS]

    def _start(self, kind):
        return subprocess.Popen(
            [sys.executable, "-m", SETTINGS, kind],
            env=self.environment,
            stdout=self.log,
            stderr=self.log,
        )

    def replace_the_dead(self):
        for number, (kind, process) in enumerate(self.running):
            if process.poll() is not None:
                self.died += 1
                self.running[number] = kind, self._start(kind)

    def of(self, kind):
        return [process for other, process in self.running if kind == other]

    def kill(self, process):
        process.kill()
        process.wait()
        self.died -= 1  # by itself

    def end(self, kind):
        for process in self.of(kind):
            process.kill()
            process.wait()
        self.running = [each for each in self.running if each[0] != kind]

    def end_all(self):
        for kind in set(WORKERS):
            self.end(kind)


class Campaign:
    def __init__(self, cluster, node, options):
        self.cluster, self.node, self.options = cluster, node, options
        self.chance, self.struck, self.lost = random.Random(options.seed), Counter(), 0
        self.references = [f"import-{each}" for each in range(options.operations)]

    def run(self, directory):
        """Return what became of each operation; ``None`` if all is as it should be."""
        from tests.support.servers import prepare_database, running_server

        url = self.cluster.url()
        prepare_database(url)
        with psycopg.connect(url) as connection:
            connection.execute(GUARD)
            connection.commit()
            connection.execute(EARLY)
            assert connection.execute(TOO_EARLY).fetchall() == [("early",)]
            connection.rollback()
        own = {"HINTS_URL": self.node.url, "DJANGO_SETTINGS_MODULE": SETTINGS}
        given = os.environ | own | {"DATABASE_URL": url}
        with (
            Path(directory, "workers.log").open("wb") as log,
            running_server(url, directory, workers=WEB_WORKERS, **own) as self.server,
            ThreadPoolExecutor(CLIENTS) as pool,
        ):
            self.workers = Workers(given, log)
            self.began = time.monotonic()
            try:
                found = [pool.submit(self.outcome, *one) for one in self.requests()]
                self.harm(found)
            finally:
                self.workers.end_all()
        return [each.result() for each in found]

    # --- What a client does -----------------------------------------------------------

    def requests(self):
        apart = 60 * self.options.minutes / self.options.operations
        return ((apart * n, reference) for n, reference in enumerate(self.references))

    def outcome(self, when, reference):
        threading.Event().wait(max(0, self.began + when - time.monotonic()))
        try:
            return self._outcome(reference)
        except Exception as error:
            return f"{reference}: {error!r}"

    def _outcome(self, reference):
        accepted = self.final("POST", "/api/imports/", reference)
        if accepted.status_code not in (201, 202):
            return f"{reference}: refused with {accepted.status_code}"
        location = accepted.headers.get("Location", "")  # none, if it is done already
        if accepted.status_code == 202:
            shown = self.final("GET", location, None, until="succeeded")
            if shown.status_code != 200:
                return f"{reference}: lost, {shown.status_code} {shown.text}"
            if shown.json()["status"] != "succeeded":
                return f"{reference}: {shown.text}"
        done = self.final("POST", "/api/imports/", reference)
        if done.status_code != 201 or done.json()["reference"] != reference:
            return f"{reference}: {done.status_code} {done.text}"
        return None

    def final(self, method, path, reference, until=None):
        """The response, once it is none that passes."""
        body = {"json": payment(reference)} if reference else {}
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                response = self.server.request(method, path, key=reference, **body)
                passing = response.status_code in (409, 500, 503)
                if until and response.status_code == 200:
                    passing = response.json()["status"] == "running"
                if not passing:
                    return response
            threading.Event().wait(1)
        raise TimeoutError(f"not done within {PATIENCE} s")

    # --- What harms it ----------------------------------------------------------------

    def harm(self, found):
        strikes, due, halved = [], time.monotonic() + PAUSES[0], False
        while not all(each.done() for each in found):
            self.workers.replace_the_dead()
            if not halved and found[len(found) // 2].done():
                halved = True
                self.workers.end("poll")
            if time.monotonic() > due:
                strikes = strikes or self.chance.sample(STRIKES, len(STRIKES))
                name = strikes.pop()
                self.struck[name] += bool(getattr(self, name)())
                due = time.monotonic() + self.chance.uniform(*PAUSES)
            threading.Event().wait(0.1)

    def web(self):
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.chance.choice(self.server.workers()), signal.SIGKILL)
            return True

    def worker(self):
        alive = [*self.workers.of("poll"), *self.workers.of("read")]
        self.workers.kill(self.chance.choice(alive))
        return True

    def session(self):
        with suppress(psycopg.Error):
            return self.cluster.execute(END_SESSION)

    def postgresql(self):
        self.cluster.kill()
        self.cluster.start()
        return True

    def queue(self):
        """Lose all hints, of which there are some while nobody reads them."""
        readers = [psutil.Process(each.pid) for each in self.workers.of("read")]
        for reader in readers:
            reader.suspend()
        with suppress(TimeoutError):
            eventually(lambda: self.node.client.llen(HINTS) > 2, within=10, every=0.1)
        self.lost += self.node.client.llen(HINTS)
        self.node.kill()
        self.node.start()
        for reader in readers:
            reader.resume()
        return True

    # --- What came of it --------------------------------------------------------------

    def violations(self, outcomes):
        with psycopg.connect(self.cluster.url()) as connection:
            effects = dict(connection.execute(EFFECTS).fetchall())
            early = connection.execute(TOO_EARLY).fetchall()
            (left,) = connection.execute(LEFT).fetchone()
        wrong = {each: effects.pop(each, 0) for each in self.references}
        return [
            *filter(None, outcomes),
            *(
                f"{name}: {count} effects"
                for name, count in wrong.items()
                if count != 1
            ),
            *(f"{name}: nobody's effect" for name in effects),
            *(f"{name}: run before its 202 was committed" for (name,) in early),
            *([f"{left} operations are left"] if left else []),
        ]


if __name__ == "__main__":
    sys.exit(main())
