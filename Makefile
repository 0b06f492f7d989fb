# Every target finds or makes the Python environment that it needs (tools/environment.py), builds what changed and runs.
# `make help` prints the table of targets in CONTRIBUTING.md.

STARTER := $(or $(PYTHON),$(wildcard .venv/bin/python),python3)
ENVIRONMENT = py=$$($(STARTER) tools/environment.py $(1)) &&
BUILD = "$$py" setup.py --quiet build_ext --inplace --strict &&

ASAN = build/asan
CHECKED = build/checked
# random programs, and the tests of one unit in all its states
CHECKS = fsdp/unit/test_fsdp_random.py fsdp/unit/test_unit_type.py
C_FILES = $(wildcard csrc/*/*.c csrc/*/*.h csrc/*/*.cpp csrc/*/*.hpp csrc/*/*.cu tests/c/*.c tests/c/*.h tests/c/*/*.c tests/c/*/*.h benchmarks/*.c)

.PHONY: help venv build wheel demo test test-all simulate simulate-release equality integrations bench docs coverage instructions lint format asan check-build cuda-check test-gpu bench-gpu cuda-sanitize upstream clean

help:
	@sed -n '/^| `[mPA]/{s/\[\([^]]*\)\]([^)]*)/\1/g;s/`//g;s/^| //;s/ |$$//;s/ | /|/;p;}' CONTRIBUTING.md | \
		awk -F '|' '{printf "%-40s %s\n", $$1, $$2}'

venv:
	@$(call ENVIRONMENT,build demo test lint) echo "flatparam: environment ready: $$py"

build:
	@$(call ENVIRONMENT,build) $(BUILD) true

wheel:
	@$(call ENVIRONMENT,build wheel) "$$py" tools/wheel.py $(TORCHES)

demo:
	@$(call ENVIRONMENT,build demo) $(BUILD) "$$py" -m examples.demo $(ARGS) $(if $(ARGS),,&& "$$py" -m examples.demo.scripts)

test: MARKED = -m "not thorough"
test test-all:
	@$(call ENVIRONMENT,build demo test) $(BUILD) "$$py" -m pytest -n auto --maxprocesses 5 --dist loadfile \
		--no-loadscope-reorder $(MARKED) $(ARGS)

simulate: SEEDS = 5000
simulate-release: SEEDS = 100000
simulate simulate-release:
	@$(call ENVIRONMENT,build test) $(BUILD) PYTHONPATH=.:tests/support "$$py" -m tests.simulation --seeds $(SEEDS) $(ARGS)

equality:
	@$(call ENVIRONMENT,build test) $(BUILD) PYTHONPATH=.:tests/support "$$py" tests/support/equality.py --docs $(ARGS)

integrations:
	@$(call ENVIRONMENT,build test integrations) $(BUILD) "$$py" -m pytest tests/integrations $(ARGS)

bench:
	@$(call ENVIRONMENT,build demo bench) $(BUILD) "$$py" -m benchmarks $(ARGS)

docs:
	@$(call ENVIRONMENT,build docs) $(BUILD) \
	"$$py" -m sphinx -q -W --keep-going -c docs/reference -d build/docs/.doctrees . build/docs && echo build/docs/docs/index.html

coverage:
	@$(call ENVIRONMENT,build demo test coverage) $(BUILD) "$$py" tools/covered.py $(ARGS)

instructions:
	@$(call ENVIRONMENT,build) $(BUILD) "$$py" -m benchmarks.bench_instructions --check $(ARGS) && \
	"$$py" -m benchmarks.bench_step_instructions --check $(ARGS)

lint:
	@$(call ENVIRONMENT,build demo lint) $(BUILD) set -x; \
	"$$py" -m ruff check . && "$$py" -m ruff format --check . && \
	"$$(dirname "$$py")/clang-format" --dry-run -Werror $(C_FILES) && \
	"$$(dirname "$$py")/basedpyright" --pythonpath "$$py" && \
	"$$py" -m mypy && printf '[mypy]\n[mypy-torch.*,flatparam.*]\nfollow_imports = skip\n' | \
	"$$py" -m mypy.stubtest --mypy-config-file /dev/stdin flatparam._C

format:
	@$(call ENVIRONMENT,lint) set -x; \
	"$$py" -m ruff check --fix --quiet .; "$$py" -m ruff format . && "$$(dirname "$$py")/clang-format" -i $(C_FILES)

asan:
	@$(call ENVIRONMENT,build demo test) rm -rf $(ASAN)/flatparam && \
	"$$py" setup.py --quiet build_py --build-lib $(ASAN) && \
	"$$py" setup.py --quiet build_ext --sanitize --build-lib $(ASAN) && \
	FLATPARAM_TEST_RANKS=processes "$$py" tools/sanitized.py $(ASAN) $(ARGS)

# The ranks of a test take the package from the folder that they start in.
check-build:
	@$(call ENVIRONMENT,build demo test) case $$py in /*) ;; *) py=$(CURDIR)/$$py ;; esac && rm -rf $(CHECKED)/flatparam && \
	"$$py" setup.py --quiet build_py --build-lib $(CHECKED) && \
	"$$py" setup.py --quiet build_ext --checks --strict --build-lib $(CHECKED) && cd $(CHECKED) && \
	"$$py" -m pytest -n auto --maxprocesses 5 --capture=sys -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) \
		-o "pythonpath=$(CHECKED) tests/support ." $(addprefix $(CURDIR)/tests/,$(CHECKS)) $(ARGS)

cuda-check:
	@$(call ENVIRONMENT,build) "$$py" setup.py --quiet cuda_check

test-gpu:
	@$(call ENVIRONMENT,build) $(BUILD) "$$py" tools/gpu.py test $(ARGS)

bench-gpu:
	@$(call ENVIRONMENT,build) $(BUILD) "$$py" tools/gpu.py bench $(ARGS)

cuda-sanitize:
	@$(call ENVIRONMENT,build) $(BUILD) "$$py" tools/gpu.py sanitize $(ARGS)

upstream:
	@$(call ENVIRONMENT,build test upstream) $(BUILD) "$$py" tests/upstream/run.py $(ARGS)

clean:
	rm -rf build dist *.egg-info flatparam/_C.*.so flatparam/_build_info.py
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find flatparam tests tools benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
