# Every target sets up what it needs; the first run takes a few minutes.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz mutants test-boot test-image check golden picture bench image clean

BIN := .venv/bin
# A Debian with the package python3.11 alone has no python3.
PYTHON ?= $(shell command -v python3 || echo python3.11)
SETUP := .venv/.set-up
# The modules that tool.mutmut and the contract "the core is pure" name in pyproject.toml.
CORE = $(shell $(BIN)/python -c 'import tomllib; print(",".join(tomllib.load(open("pyproject.toml", "rb"))["tool"]["mutmut"]["only_mutate"]))')
AS_ROOT := $(shell test $$(id -u) = 0 && echo yes)

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP)  ## make .venv with the command and all tools

$(SETUP): pyproject.toml hatch_build.py $(wildcard protos/*.proto)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; say which with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		if [ -n "$(AS_ROOT)" ]; then \
			echo "installing python3-venv"; \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; \
		else echo "python3-venv is missing: apt-get install python3-venv" >&2; exit 1; fi; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: setup  ## start the sidecar, play virt-launcher against it, show what happens
	@tests/system/install.sh debian12
	@$(BIN)/python -m tests.demo

test: setup  ## install libvirt and QEMU of Debian 12 and 13 where possible, run all tests
	@tests/system/install.sh all
	$(BIN)/python -m pytest -n 2 --dist loadgroup --cov --cov-report=term:skip-covered $(if $(TESTS),,--cov-fail-under=95) $(TESTS)
	@$(if $(TESTS),,echo "every branch of the core:" && $(BIN)/coverage report --include=$(CORE) --fail-under=100)

fuzz: setup  ## random VMs, plans and bytes, other ones each time and FUZZ times as many (20)
	@tests/system/install.sh all
	FUZZ=$(or $(FUZZ),20) $(BIN)/python -m pytest -n 2 --dist loadgroup tests/test_properties.py tests/test_random_plans.py tests/test_fuzz.py

mutants: setup  ## change the core in 3,400 ways and see that a test fails (half an hour on two cores)
	nice -n 19 $(BIN)/mutmut run --max-children 2
	$(BIN)/python -m tests.mutants

test-boot: setup  ## boot every machine, layout, firmware and limit, and a systemd guest (20 minutes on two cores)
	@tests/system/install.sh all
	@tests/system/install.sh systemd
	$(BIN)/python -m pytest -m boot -n 2 tests/boot

test-image: setup  ## build the image, run it under KubeVirt's limits (needs buildah, podman, runc)
	@tests/system/install.sh containers
	@tests/system/install.sh debian12
	@tests/system/install.sh boot
	$(BIN)/python -m pytest -m image -rP tests/image

check: setup  ## lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

golden: setup  ## rewrite the goldens; read the diff before you commit it
	REGENERATE=1 $(BIN)/python -m pytest -q tests/test_scenarios.py tests/test_cases.py tests/test_cli.py \
		tests/test_recording.py tests/test_picture.py tests/test_verify.py tests/test_nccl.py tests/test_check.py \
		tests/test_examples.py tests/test_annotate.py || true
	git diff --stat -- tests/goldens

picture: setup  ## draw docs/picture.svg again
	$(BIN)/pcie-numa-hook plan --format svg --layout switch --domain docs/picture.xml \
		--sysfs tests/hosts/dgx1v.sysfs --pci-ids tests/pci.ids > docs/picture.svg

bench: setup  ## time start, calls and the planner, as ratios within one run
	@$(BIN)/python -m pytest -q -m bench --benchmark-enable --benchmark-quiet tests/bench

image: setup  ## build the container image with buildah or podman
	tests/image/build.sh

clean:  ## remove what was made here
	rm -rf .venv build dist hook/protocol .*_cache .coverage* mutants .hypothesis
