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

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z][a-z-]*:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ The main jobs (each sets up what it needs)
demo: setup ## All steps on SmolLM2-135M-Instruct, no GPU: a draft and what it is worth, in about 12 minutes
	$(RUN) -m pipeline demo $(ARGS)

test: setup .venv-serve/.complete ## All tests, on the real engine, in about 12 minutes (ARGS="-k states" for some)
	$(RUN) -m pytest $(ARGS)

##@ Steps (make extract CONFIG=configs/NAME.toml ARGS="--extract.shard_tokens 8192")
CONFIG ?= configs/smollm2-135m.toml
prepare extract vocab train evaluate serve: setup ## One step; what its manifest proves done is not done again
	$(RUN) -m pipeline $@ --config $(CONFIG) $(ARGS)

##@ Upkeep
setup: .venv/.complete ## Make .venv: the locked packages, speculators patched
check: setup ## Lint, types, patches, and every call into vLLM against the signatures of both builds
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright
	$(RUN) pipeline/patching.py verify speculators
	$(RUN) -m pipeline.preflight.contract

lock: $(UV) ## Resolve the locks anew from their .in files (needs a package index)
	cd $(LOCKS) && for set in "requirements overrides cpu" "serve serve-overrides serve"; do \
	  read -r in overrides out <<< "$$set"; \
	  $(CURDIR)/$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	    --no-emit-find-links --custom-compile-command "make lock" --override $$overrides.txt $$in.in -o $$out.txt; done

clean: ## Remove the environments and the demo's run (models and other runs stay)
	rm -rf .venv .venv-serve .venv-uv runs/smollm2-135m .pytest_cache .ruff_cache .hypothesis

$(UV): $(LOCKS)/uv.txt
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c '$(IN_RANGE)' || \
	  { echo "setup: no Python 3.11 or 3.12 found. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 2; }
	@command -v patch >/dev/null || { echo "setup: GNU patch is not installed (package: patch)" >&2; exit 2; }
	"$(PYTHON)" -m venv --clear .venv-uv
	.venv-uv/bin/pip install -q --disable-pip-version-check --require-hashes -r $(LOCKS)/uv.txt

# speculators is installed anew each time, so that the patches always meet the released files
.venv/.complete: $(UV) $(LOCKS)/cpu.txt pipeline/patching.py $(wildcard patches/speculators/*)
	[ -x .venv/bin/python ] || $(UV) venv -q --python "$(PYTHON)" .venv
	VIRTUAL_ENV=.venv $(UV) pip sync -q --require-hashes --reinstall-package speculators $(LOCKS)/cpu.txt
	$(RUN) pipeline/patching.py apply speculators
	touch $@

.venv-serve/.complete: $(UV) $(LOCKS)/serve.txt
	[ -x .venv-serve/bin/python ] || $(UV) venv -q --python "$(PYTHON)" .venv-serve
	VIRTUAL_ENV=.venv-serve $(UV) pip sync -q --require-hashes $(LOCKS)/serve.txt
	touch $@

.PHONY: help demo test prepare extract vocab train evaluate serve setup check lock clean
