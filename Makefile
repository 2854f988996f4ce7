PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --timeout 900 --timeout-method thread

.DEFAULT_GOAL := help
.PHONY: help demo serve test-quick test test-citus faults lint audit types migrations-check messages docs \
	compatibility bench dev lock dist sbom clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.serve ## retries, duplicates and a killed worker against a real server, before your eyes
	@$(BIN)/python -m testproject.demo

serve: .venv/.serve ## the test project's payments service on $PORT (8000) in $WORKERS processes (2), with the admin (admin/admin)
	@$(BIN)/python -m testproject serve

test-quick: .venv/.test ## the laws, the engine, HTTP and what needs no database, in some three minutes
	@LEAVE_OUT="slow server browser" $(PYTEST) tests/laws tests/engine tests/http tests/unit

test: .venv/.test ## the tests, in $WORKERS processes (4), on $DATABASE_URL or else the shorter ones on an embedded PostgreSQL
	@$(if $(DATABASE_URL)$(EXHAUSTIVE),EXHAUSTIVE=1,LEAVE_OUT=slow) $(PYTEST)

test-citus: .venv/.dev ## the laws, stores and maintenance on a table that Citus distributes, at $CITUS_URL; then its servers are killed
	@DATABASE_URL=$(CITUS_URL) IDEMPOTENCY_DISTRIBUTED=1 $(PYTEST) tests/laws tests/stores tests/maintenance
	@DATABASE_URL=$(CITUS_URL) IDEMPOTENCY_DISTRIBUTED=1 $(PYTEST) -n 0 -s tests/contrib/citus/test_citus.py

faults: .venv/.dev ## the service under crashes, cuts and failovers for half an hour, and every state of the models
	@$(BIN)/python -m tests.faults
	@ALL_STATES=1 $(PYTEST) tests/faults/test_model.py

compatibility: ## other packages' newest versions beside this one, each in an environment of its own; NAMES="views silk" for some
	@$(PYTHON) -m tests.compatibility --write $(if $(DATABASE_URL),--database $(DATABASE_URL)) $(NAMES)

lint: .venv/.lint ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

audit: .venv/.lint ## bandit, which needs no network; CONTRIBUTING.md says how dependencies are audited
	@$(BIN)/bandit --quiet --configfile pyproject.toml --severity-level medium --confidence-level medium \
		--recursive django_idempotency

types: .venv/.types ## mypy
	@$(BIN)/mypy

migrations-check: .venv/.serve ## no model without its migration
	@$(BIN)/python -m testproject makemigrations --check --dry-run

messages: .venv/.serve ## bring the catalogues of translations up to date with the code, and compile them; needs GNU gettext
	@cd django_idempotency && ../$(BIN)/django-admin makemessages --all --no-wrap --no-obsolete --add-location file
	@cd django_idempotency && ../$(BIN)/django-admin compilemessages

docs: .venv/.docs ## the documentation as a site, in site/; every link and anchor is checked
	@$(BIN)/properdocs build --strict --clean --quiet

bench: .venv/.serve ## what the guarantees cost, beside an unprotected view and other packages; QUICK=1 for a first look
	@$(BIN)/python -m testproject.benchmarks $(if $(QUICK),--quick) $(BENCH) --json .benchmarks/results.json

dev: .venv/.dev ## install everything that tests, types and releases need

lock: .venv/.dev ## write the versions that are installed to constraints.txt
	@echo "# The versions with which all tests passed. PIP_CONSTRAINT=constraints.txt make dev installs them." >constraints.txt
	@$(BIN)/python -m pip freeze --exclude-editable >>constraints.txt

dist: .venv/.release ## the source distribution and the wheel, the same to the byte wherever they are built
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build
	@$(BIN)/twine check --strict dist/*

sbom: dist ## the package and what an installation of the wheel brings with it, as CycloneDX
	@$(PYTHON) -m venv --clear --without-pip build/installed
	@$(PIP) --python build/installed/bin/python install dist/*.whl
	@$(BIN)/cyclonedx-py environment build/installed -o build/sbom.json

clean: ## remove the virtual environment, the embedded PostgreSQL and what was built
	rm -rf .venv site .benchmarks .embedded-postgres .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

.venv/.%: pyproject.toml # the package, and the dependency group of that name
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Installing what $* needs into .venv …"
	@$(PIP) install "pip>=25.1" # the first with dependency groups
	@$(PIP) install -e . --group $*
	@touch $@
