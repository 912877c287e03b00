# Two commands are the whole set-up: `make demo` and `make test`.
PYTHON ?= python3
TORCH  ?= -c constraints.txt
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.made

export DAGSTER_HOME := $(CURDIR)/.dagster
export DAGSTER_EVENT_BATCH_SIZE := 1000
export DAGSTER_DISABLE_TELEMETRY := yes
export NMOE_CONFIG ?= demo

.PHONY: setup demo test test-long test-newest test-all ui lint docs wheels bench crash fuzz soak clean

setup: $(STAMP) $(DAGSTER_HOME)/dagster.yaml  ## the environment, in .venv

$(STAMP): pyproject.toml loader/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH) -e ./loader -e '.[all,dev]'
	touch $@

$(STAMP)-all: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH) -e '.[test-all]'
	touch $@

$(DAGSTER_HOME)/dagster.yaml: configs/dagster/dagster.yaml
	mkdir -p -m 700 $(DAGSTER_HOME)
	cp $< $@

# With BACKBONE=smollm2, a real backbone, which the first run downloads; without it, no network.
# With ROOT=s3://bucket/demo, the run is kept in a bucket.
ifdef BACKBONE
ROOT ?= build/demo-$(BACKBONE)
demo: SETTINGS := $(addprefix --set ,backbone.kind=checkpoint backbone.checkpoint=$(BACKBONE) \
	backbone.moe_backend=int8 compute.workers=2)
endif
ifdef ROOT
demo: SETTINGS += --set root=$(ROOT)
endif
demo: setup  ## the main job on real text found on this machine
	$(BIN)/python -m nmoe_core.cli.project.write_docstrings build/demo/input/docstrings.jsonl
ifdef ROOT
	$(BIN)/nmoe run --config $(NMOE_CONFIG) $(SETTINGS)
else
	$(BIN)/dagster job execute -m nmoe_assets.definitions -j pipeline
endif
	$(BIN)/nmoe report --config $(NMOE_CONFIG) $(SETTINGS) --sample 10

# Two processes share the test files; one thread each, as they would fight over the cores otherwise.
# In the order of directories, the longest files come early: no process waits for the other's last.
TEST_WORKERS ?= 2
test test-long test-newest test-all crash fuzz soak: export OMP_NUM_THREADS := 1
PYTEST_FLAGS := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
test test-long test-all crash: PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)
test-all crash: export HYPOTHESIS_PROFILE := random

test: setup  ## the tests: no GPU, no hub
	$(PYTEST)

test-long: setup  ## second proofs of what the quick tests show, and whole runs in processes of their own
	$(PYTEST) -m long

# The newest Python on this machine that is supported and newer than the environment's own.
NEWEST = $(shell own=$$($(BIN)/python -c 'import sys; print(sys.version_info.minor)'); \
	for minor in 13 12; do [ $$minor -gt $${own:-99} ] || exit 0; \
	for python in python3.$$minor $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$minor.*/bin/python; do \
	"$$python" -c 'import ensurepip' 2>/dev/null && echo "$$python" && exit; done; done)
NEWEST_TESTS := tests/core/prep/test_pipeline.py tests/core/attributes/test_where.py \
	tests/core/config/test_config.py tests/test_house.py \
	$(addprefix tests/loader/test_,$(addsuffix .py,cli format plan schedule state))

# Without torch: its public build is several gigabytes.
test-newest: setup  ## part of the tests on the newest Python here, in .venv-newest
ifeq ($(NEWEST),)
	@echo "make test-newest: skipped, since no Python newer than that of $(VENV) is on this machine"
else
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt -e ./loader -e '.[attributes]' hypothesis pytest pytest-timeout pytest-xdist
	.venv-newest/bin/python --version
	.venv-newest/bin/python -m pytest $(PYTEST_FLAGS) $(NEWEST_TESTS)
endif

test-all: $(STAMP)-all  ## the slow tests too, with Ray and a PostgreSQL to start
	$(PYTEST) -m 'not gpu'

crash: setup  ## kill and resume; every place with FULL=1, others with CRASH_SEED=N
	$(PYTEST) $(if $(FULL),-m 'not gpu') tests/crash

ui: setup  ## Dagster in the browser
	$(BIN)/nmoe ui --config $(NMOE_CONFIG)

fuzz: setup  ## N changed files of each format, from SEED on
	$(BIN)/python -m tests.fuzz -n $(or $(N),1000) $(if $(SEED),--seed $(SEED))

soak: setup  ## long runs whose memory must stay flat; one with ONLY=NAME, shorter with SCALE=0.5
	$(BIN)/python -m benchmarks.soak $(if $(ONLY),--only $(ONLY)) $(if $(SCALE),--scale $(SCALE))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

docs: setup  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheels: setup  ## both wheels and a CycloneDX bill of materials, in build/wheels
	rm -rf build/wheels build/lib build/bdist.* loader/build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w build/wheels ./loader .
	$(BIN)/python .ci/make_sbom.py build/wheels

bench: setup  ## headline figures as ratios against a peer or a physical limit
	$(BIN)/python -m benchmarks

clean:  ## remove what was made; the next command makes it again
	rm -rf build .dagster $(VENV) .venv-newest .pytest_cache .ruff_cache .hypothesis .import_linter_cache
