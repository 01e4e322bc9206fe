# Everything runs in .venv; a stamp per extra inside it makes repeated installs free.
PYTHON ?= python3
BIN := .venv/bin
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor

.PHONY: help demo test lint proof hunt bench quality matrix recipes docs release clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST)

demo: .venv/.installed-demo ## the method in one run; open demo/report.html
	$(BIN)/python -m bench.demo

# With a worker on each core, threads that spin while they wait take the cores from those that work.
test: export OMP_WAIT_POLICY ?= passive
test: .venv/.installed-test ## the test suite, two workers
	$(BIN)/python -m pytest -n 2 --durations=15

lint: .venv/.installed-test .venv/.installed-lint ## ruff and pyright over source and tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

proof: .venv/.installed-test ## the exhaustive proofs of the bounds
	$(BIN)/python -m bench.proof

hunt: .venv/.installed-test ## random courses of use, threads, growth and interrupts, 30 minutes
	$(BIN)/python -m bench.hunt

bench: .venv/.installed-bench ## the benchmarks behind the README's figures
	$(BIN)/python -m bench

quality: .venv/.installed-quality ## exact fp32 training beside ours, hours; ROW=digits for some rows
	$(BIN)/python -m bench.quality $(if $(ROW),--row "$(ROW)")

matrix: ## the suite and the speed row on every supported torch, hours; TORCH=2.15.0 for one
	$(PYTHON) -m bench.matrix $(if $(TORCH),--torch $(TORCH)) $(if $(ONLY),--only "$(ONLY)")

recipes: .venv/.installed-recipes ## the examples for Trainer, Accelerate, Lightning and others
	$(BIN)/python -m pytest tests/test_recipes.py -rs

docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/.installed-docs ## the site, in site/
	$(BIN)/mkdocs build --strict

release: .venv/.installed-release ## the wheel and the source package, in dist
	rm -rf dist build
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean: ## remove the venv, caches and build products
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis build dist site demo *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed-%: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@
