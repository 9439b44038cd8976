# make setup   .venv with the pinned packages and the `covey` command
# make test    set-up, lint, the tests that CI runs (PYTEST_ARGS="-k cache" narrows them);
#             a quarter of an hour on two cores; with the slow ones: .venv/bin/python -m pytest
# make demo    set-up, then the built-in model under four schedulers, side by side
# make lint    ruff and pyright            make status   specs/STATUS.md anew
# make search  random examples for the rule-based machines
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-deps
STAMP := .venv/.covey-setup
PYTEST_ARGS ?=

.PHONY: setup test search lint demo status
.DEFAULT_GOAL := setup

setup: $(STAMP)

# The stamp is newer than what decides the environment; one made by hand is taken over.
$(STAMP): pyproject.toml requirements/dev-3.11.txt requirements/dev-3.13.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Covey needs Python 3.11 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP) -r requirements/dev-$$($(PY) -c 'import sys; print("3.11" if sys.version_info < (3, 12) else "3.13")').txt
	$(PIP) --no-build-isolation --editable .
	@touch $@

test: setup lint
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

# New random examples instead of the same ones: for the night.
search: setup
	$(PY) -m pytest -m "not slow" --hypothesis-profile=search -o timeout=3600 property_tests/test_machines.py $(PYTEST_ARGS)

lint: setup
	$(PY) -m ruff check --no-cache .
	$(PY) -m pyright

demo: setup
	$(PY) -m jax_impl.app.main demo

status: setup
	$(PY) specs/status.py > specs/STATUS.md.new && mv specs/STATUS.md.new specs/STATUS.md
