# Every target says what it does before it does it.  `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Debian packages that the system tests want.  RUNLEVEL=1 below: they start no service.
SYSTEM_PACKAGES := curl redis-server redis-tools openssl nodejs

.DEFAULT_GOAL := help
.PHONY: help venv run demo bench test test-system check format containers clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with everything installed (again only when the pins changed)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) with $$($(PYTHON) --version), and installing npufleet with all extras"
	@$(PYTHON) -c 'import sys; sys.exit("npufleet needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]' -c constraints.txt
	@touch $@

run: venv ## start everything on this machine: Redis, a worker and a gateway
	@echo "==> npufleet up (Ctrl-C stops everything)"
	@$(BIN)/npufleet up

demo: venv ## start the fleet, classify the sample images, check the answers, stop
	@echo "==> npufleet demo"
	@$(BIN)/npufleet demo

bench: venv ## measure this machine, and other servers on it (BENCH_ARGS=--quick to try it)
	@echo "==> python -m bench $(BENCH_ARGS)  (about an hour; results in build/bench)"
	@$(BIN)/python -m bench $(BENCH_ARGS)

test: venv ## run the tests that need nothing but Python
	@echo "==> unit, contract and integration tests, on a real Valkey and with real processes"
	@$(BIN)/python -m pytest -m "not system and not containers" -n auto --dist worksteal $(PYTEST_ARGS)

test-system: venv ## install Debian packages (redis-server, node, ...) and run the tests that want them
	@echo "==> system tests; they use: $(SYSTEM_PACKAGES)"
	@if ! command -v apt-get >/dev/null; then echo "no apt-get here: using what is installed"; \
	elif dpkg -s $(SYSTEM_PACKAGES) >/dev/null 2>&1; then echo "packages are installed already"; \
	else sudo=$$(test "$$(id -u)" = 0 || echo sudo); \
	  $$sudo apt-get update -qq && \
	  $$sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
	    apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES) >/dev/null; fi
	@$(BIN)/python -m pytest -m system $(PYTEST_ARGS)
	@echo "==> the integration tests again, on Debian's Redis rather than on Valkey"
	@redis=$$(command -v redis-server) || { echo "skipped: no redis-server here"; test "$$CI" != true; exit; }; \
	  NPUFLEET_TEST_REDIS_BINARY=$$redis $(BIN)/python -m pytest tests/integration \
	    -m "not system and not containers" -n auto --dist worksteal $(PYTEST_ARGS)

check: venv ## formatting, lint, types and the direction of imports; changes no file
	@echo "==> ruff format --check, ruff check, mypy --strict, import contracts"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: venv ## format the code and fix what ruff can fix
	@echo "==> ruff format, ruff check --fix"
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

containers: ## build the images and prove docker-compose.yml with them (needs root)
	@echo "==> deploy/containers/prove.sh"
	@deploy/containers/prove.sh || test $$? -eq 77 # skipped, and it has said why

clean: ## remove .venv, caches and the local fleet's state
	@echo "==> removing $(VENV), caches and .npufleet (queued work included)"
	@rm -rf $(VENV) .npufleet build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
