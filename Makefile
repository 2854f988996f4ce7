PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint types migrations-check clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## retries, duplicates and a killed worker against a real server, before your eyes
	@$(BIN)/python -m testproject.demo

serve: $(READY) ## the test project's payments service on $PORT (8000), with the admin (admin/admin)
	@$(BIN)/python -m testproject serve

test: $(READY) ## the tests, on $DATABASE_URL or else on an embedded PostgreSQL
	@$(BIN)/python -m pytest

lint: $(READY) ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY) ## mypy
	@$(BIN)/mypy

migrations-check: $(READY) ## no model without its migration
	@$(BIN)/python -m testproject makemigrations --check --dry-run

clean: ## remove the virtual environment, the embedded PostgreSQL and what was built
	rm -rf .venv .embedded-postgres .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

$(READY): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Installing into .venv …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@
