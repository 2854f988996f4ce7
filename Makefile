PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 4
WITH_DOCS = $(BIN)/python -c "import mike, properdocs" 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-citus faults lint audit types migrations-check messages docs docs-release bench clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## retries, duplicates and a killed worker against a real server, before your eyes
	@$(BIN)/python -m testproject.demo

serve: $(READY) ## the test project's payments service on $PORT (8000), with the admin (admin/admin)
	@$(BIN)/python -m testproject serve

test: $(READY) ## the tests, in $WORKERS processes (4), on $DATABASE_URL or else on an embedded PostgreSQL
	@$(if $(DATABASE_URL),EXHAUSTIVE=1) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--timeout 900 --timeout-method thread

test-citus: $(READY) ## the laws, stores and maintenance on a table that Citus distributes, at $CITUS_URL
	@DATABASE_URL=$(CITUS_URL) IDEMPOTENCY_DISTRIBUTED=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
		--no-loadscope-reorder --timeout 300 tests/laws tests/stores tests/maintenance

faults: $(READY) ## the service under crashes, cuts and failovers for twenty minutes, and a verdict on its history
	@$(BIN)/python -m tests.faults

lint: $(READY) ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

audit: $(READY) ## bandit, which needs no network; CONTRIBUTING.md says how dependencies are audited
	@$(BIN)/bandit --quiet --configfile pyproject.toml --severity-level medium --confidence-level medium \
		--recursive django_idempotency

types: $(READY) ## mypy
	@$(BIN)/mypy

migrations-check: $(READY) ## no model without its migration
	@$(BIN)/python -m testproject makemigrations --check --dry-run

messages: $(READY) ## bring the catalogues of translations up to date with the code, and compile them; needs GNU gettext
	@cd django_idempotency && ../$(BIN)/django-admin makemessages --all --no-wrap --no-obsolete --add-location file
	@cd django_idempotency && ../$(BIN)/django-admin compilemessages

docs: $(READY) ## the documentation as a site, in site/; every link and anchor is checked
	@$(WITH_DOCS)
	@$(BIN)/properdocs build --strict --clean --quiet

docs-release: $(READY) ## the documentation of this version, beside that of earlier ones on the local branch gh-pages
	@$(WITH_DOCS)
	@version=$$($(BIN)/python -c "import django_idempotency; print(django_idempotency.__version__)") && \
		export PATH="$(abspath $(BIN)):$$PATH" DOCS_VERSION="$$version" && \
		mike --quiet deploy --alias-type copy --update-aliases "$$version" stable && mike set-default stable

bench: $(READY) ## what the guarantees cost, beside an unprotected view and other packages; QUICK=1 for a first look
	@$(BIN)/python -c "import matplotlib" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,bench]"
	@$(BIN)/python -m testproject.benchmarks $(if $(QUICK),--quick) $(BENCH) \
		--json .benchmarks/results.json --svg .benchmarks/results.svg

clean: ## remove the virtual environment, the embedded PostgreSQL and what was built
	rm -rf .venv site .benchmarks .embedded-postgres .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

$(READY): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Installing into .venv …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@
