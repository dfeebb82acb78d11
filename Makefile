# Each target sets up on first use (setup_env.sh) and uses the active environment when that has the dependencies.
#   make test ARGS="tests/config -k arm"     more arguments for pytest
SHELL := bash
python = python="$$(./setup_env.sh dev)" && "$$python"

.PHONY: test test-slow test-heavy lint format docs clean

test:  ## what a change must pass: CPU only, minutes
	$(python) -m pytest -m "not slow and not gpu and not multi_gpu" $(ARGS)

test-slow:  ## CPU tests of more than ten seconds each, then every parity row: writes docs/parity.md
	$(python) -m pytest -m "slow and not gpu and not multi_gpu" --ignore tests/parallelisms $(ARGS)
	export PARITY_TABLE=docs/parity.md && $(python) -m pytest -m "not gpu and not multi_gpu" tests/parallelisms

test-heavy:  ## needs GPUs; those that need more than there are skip
	$(python) -m pytest -m "gpu or multi_gpu" $(ARGS)

lint:
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format:
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

docs:  ## docs/configuration.md, from the schema
	$(python) -m config docs

clean:  ## caches only: never outputs/ or .venv
	rm -rf .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
