# One environment, made once per change of what it holds: the demo needs the library and scikit-learn, the tests all else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
# Tests start many processes; each would compile the whole package where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=

# 6 MB. The dependencies it names would replace NumPy, transformers and torch by older ones, and bring torchvision.
STREAMING := mosaicml-streaming Brotli catalogue cramjam python-snappy zstd

.PHONY: install demo test quick test-ci test-all test-slow test-resume test-faults test-elastic test-soak test-slurm test-browser test-gpu lint types docs compat wheel release-check test-torch bench bench-peers install-size bench-gpu clean

demo: $(VENV)/.demo
	$(BIN)/python examples/digits.py
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(QUICK_PIP) setuptools
	$(QUICK_PIP) --no-build-isolation --editable '.[examples]'
	touch $@
# Files are compiled when they are imported. The package is built with the setuptools that TensorBoard needs anyway.
QUICK_PIP = PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile \
  --constraint constraints.txt

install: $(VENV)/.installed
$(VENV)/.installed: $(VENV)/.demo
	@echo "installing the packages of the tests, about 1 GB: this takes minutes"
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,examples]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt $(STREAMING)
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some packages hold templates that are no Python
	touch $@

# One process more than cores, because tests that start processes also wait: on 2 cores, 3 took 6:51 where 4 took 7:56.
SUITE = $(BIN)/python -m pytest -n $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)') --dist loadfile --no-loadscope-reorder -m
CI_TESTS := not exhaustive and not slow and not faults and not soak and not slurm and not browser and not gpu

# Without the tests marked long, which take two thirds of the time of all: at most 8 minutes on 2 slow cores.
test: install
	$(SUITE) 'not long and $(CI_TESTS)' $(ARGS)

# What CI runs: the same, and the tests that take seconds each.
test-ci: install
	$(SUITE) '$(CI_TESTS)' $(ARGS)

# For the loop of an editor: what shows itself within a minute, in this process and one beside it.
quick: install
	$(BIN)/python -m pytest -q -n 2 --quick -r '' $(QUICK) $(ARGS)
QUICK := -m 'not long and not exhaustive and not slow and not faults' tests/common tests/engine tests/trainer/loop tests/trainer/core \
  $(addprefix --ignore=tests/, trainer/core/test_export.py trainer/loop/test_compile.py engine/test_quantization.py \
  engine/test_trackers.py engine/preemption engine/big_models)

# The same, and every variant of what the tests above show with one.
test-all: install
	$(SUITE) 'not slow and not faults and not soak and not slurm and not browser and not gpu' $(ARGS)

# The tests of CI beside another torch, in an environment of its own; TORCH=newest takes what pip finds.
TORCH ?= 2.14.1
OTHER := .venv-torch-$(TORCH)
test-torch: $(OTHER)/.installed
	$(subst $(BIN),$(OTHER)/bin,$(SUITE)) '$(CI_TESTS)' $(ARGS)
$(OTHER)/.installed: pyproject.toml constraints.txt
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --upgrade pip
	grep -vE '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	PYTHONWARNINGS=ignore $(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt --editable '.[test,examples]' torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))
	$(OTHER)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt $(STREAMING)
	touch $@

test-slow: install
	$(BIN)/python -m pytest -m slow --timeout 3600

# A thousand runs interrupted at random steps and resumed; TREADLE_TRIALS=n takes n set-ups, each resumed twice.
test-resume: install
	$(BIN)/python -m pytest -n 2 -m slow --timeout 3600 tests/trainer/checkpointing/test_resume_trials.py $(ARGS)

# Every fault and every signal at every point of a training, with tables of how the job ended. Two at a time: with three
# on two cores, 14 jobs of torchrun needed 5.3 to 7.3 s for an end that takes 1.5 to 5 s.
test-faults: install
	$(BIN)/python -m pytest -n 2 -q --tb short tests/fault_injection/test_matrix.py \
	  tests/strategies/distributed/test_hang_report.py $(ARGS)

# Long trainings with everything on, and a table of what they hold per minute; TREADLE_SOAK_MINUTES=n of the first.
test-soak: install
	$(BIN)/python -m pytest -m soak -q tests/fault_injection/test_soak.py $(ARGS)

# Ranks killed at random moments under launchers that restart them; machines that come and go, some of them in network
# namespaces, which takes root and the program ip. Prints a table: kills, status, seconds, latency of each restart.
test-elastic: install
	$(BIN)/python -m pytest -q -s --tb short tests/fault_injection/test_restarts.py \
	  tests/fault_injection/test_elastic_worlds.py $(ARGS)

# A SLURM cluster of two nodes on this machine, made for the tests and ended with them.
test-slurm: install
	@for program in munged slurmctld slurmd srun; do PATH=$$PATH:/usr/sbin command -v $$program > /dev/null || \
	  { echo "$$program is missing: apt-get install --no-install-recommends munge slurmctld slurmd slurm-client"; exit 1; }; done
	$(BIN)/python -m pytest -m slurm tests/strategies/launch/test_slurm.py tests/fault_injection/test_slurm_faults.py

# The pages a run leaves and those of the site, opened in a browser without a window.
test-browser: docs
	$(BIN)/python -m pytest -m browser tests/integration/test_browser.py $(ARGS)

# On this machine's first GPU, below ten minutes on an H100: in an environment of yours with a CUDA build of torch, in
# which Treadle and pytest are installed (GPU_PYTHON=path). Without a GPU those run on the CPU that can.
GPU_PYTHON ?= python3
test-gpu:
	$(GPU_PYTHON) -m pytest tests/gpu $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --offline --quiet .github

# Type checkers do not follow an editable install's import hook, so the types are checked on the installed wheel.
types: wheel
	rm -rf build/site && $(BIN)/python -m pip install --quiet --no-deps --target build/site dist/*.whl
	MYPYPATH=build/site $(BIN)/mypy -p treadle

# The site, in build/html, and its check: a broken link is an error. Its code blocks are run by the tests.
docs: $(VENV)/.docs
	$(BIN)/python .ci/check_reference.py
	$(BIN)/python .ci/build_site.py
$(VENV)/.docs: $(VENV)/.installed
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# compat/differences.toml, from the rows of docs/differences.
compat: install
	$(BIN)/python .ci/make_migration.py

# The wheel holds the tracked files of the package, the type stubs of setup.py and nothing else.
wheel: install
	rm -rf build/lib build/bdist* dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > build.log 2>&1 || (cat build.log; exit 1)
	rm build.log
	$(BIN)/python .ci/check_wheel.py dist/*.whl

# Both distributions as their users get them: contents, metadata, and the demo of each in a fresh environment.
release-check: wheel
	$(BIN)/python -m build --sdist --no-isolation --outdir dist . > build.log 2>&1 || (cat build.log; exit 1)
	rm build.log
	$(BIN)/python .ci/check_release.py dist

bench: $(BENCH)/.installed
	$(BENCH)/bin/python benchmarks/overhead.py
$(BENCH)/.installed: pyproject.toml constraints.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BENCH)/bin/python -m pip install --quiet --constraint constraints.txt --editable . lightning accelerate
	touch $@

# README's comparison, measured again beside the newest releases of the peers; an error if a cell is no longer what is found.
bench-peers: $(BENCH)/.installed
	grep -vE '^(accelerate|transformers|tokenizers)==' constraints.txt > $(BENCH)/constraints.txt
	PYTHONWARNINGS=ignore $(BENCH)/bin/python -m pip install --quiet --upgrade --constraint $(BENCH)/constraints.txt lightning accelerate transformers torchdata 'jsonargparse[signatures]'
	$(BENCH)/bin/python benchmarks/peers.py $(ARGS)

# What the wheel and its peers add to an environment with torch: seconds and megabytes.
install-size: wheel
	$(BIN)/python benchmarks/install_size.py dist

# One table of the GPU, below eight minutes on an H100; the peers are measured that the environment has.
bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu.py --json gpu.json $(ARGS)

clean:
	rm -rf $(VENV) $(BENCH) build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache
