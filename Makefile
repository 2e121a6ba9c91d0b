# All tasks of this repository; `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
OUT ?= out/demo
# Source of OSWorld's task files: a checkout or a URL. Empty: the registered files, or else the public ones.
OSWORLD ?=
OSWORLD_URL := https://github.com/xlang-ai/OSWorld
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Checks and tests the alert rules.
PROMTOOL := $(BIN)/promtool
MYPY := $(BIN)/mypy envd trainer proto/cuaenv tests docs
# All clones of a user share it, because it knows files by their content: a first check takes 52 s of processor time.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mypy/envd-trainer
# slime and torch have their own environment: nothing else here needs them.
SLIME_VENV := .venv-slime
SLIME_STAMP := $(SLIME_VENV)/.installed
# slime's code: where `trainer learn setup` puts it and the programs of tests/tools look for it, unless SLIME_HOME is set.
SLIME_CHECKOUT = $(or $(SLIME_HOME),$(lastword $(sort $(wildcard $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainer/slime-*))))
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
AREAL_VENV := .venv-areal
AREAL_STAMP := $(AREAL_VENV)/.installed
RAY_VENV := .venv-ray
RAY_STAMP := $(RAY_VENV)/.installed
# Frameworks with an adapter, each in an environment of its own: their requirements contradict each other.
ADAPTERS ?= $(patsubst tests/adapters/requirements/%.txt,%,$(wildcard tests/adapters/requirements/*.txt))
# Other versions of Python: of the distribution, or of pyenv. Harbor needs a newer one than the rest.
python_of = $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null || ls -d ~/.pyenv/versions/$(1).*/bin/python 2>/dev/null | sort -V | tail -n 1)
PYTHON312 ?= $(call python_of,3.12)
VERSIONS ?= 3.12 3.13
RUN_ADAPTERS = $(if $(PYTHON312),$(ADAPTERS),$(filter-out harbor,$(ADAPTERS)))
AGENTS_VENV := .venv-osworld-agents
AGENTS_STAMP := $(AGENTS_VENV)/.installed
# The tools that examine .venv have their own environment, so that they do not appear in it.
AUDIT_VENV := .venv-audit
AUDIT_STAMP := $(AUDIT_VENV)/.installed
# Notes that a proof passed on this commit, in docs/proofs.json.
RECORD = $(PYTHON) docs/proofs.py record
# No prompts and no version checks, for people and .ci/run.
export DEBIAN_FRONTEND := noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Containers often set it; then each of hundreds of processes compiles all of its imports.
unexport PYTHONDONTWRITEBYTECODE

# For running machines and building images.
APT_RUN := qemu-system-x86 qemu-utils libvirt-daemon-driver-qemu libvirt-daemon-system ovmf seabios swtpm \
	mmdebstrap debian-archive-keyring e2fsprogs runc uidmap
# For installing libvirt-python, which is compiled against the host's libvirt.
APT_BUILD := gcc libvirt-dev pkg-config
# For building the Wine image.
APT_WINE := gcc-mingw-w64-x86-64-win32
# For tests of the console in a browser.
APT_BROWSER := chromium
# For testing guestd and input on a virtual X screen without a guest, and for making installation media and a guest that
# boots by UEFI.
APT_TEST := xvfb xauth openbox xterm wmctrl libxcb1 binutils fdisk mtools wimtools xorriso

.PHONY: help deps quickstart venv image wine osworld web demo serve test check lint types imports proto unit fuzz soak simulate vm-test test-long test-full release \
	slime-proof sglang-proof areal-proof hosts-proof adapters-proof adapters-newest compat-proof osworld-agents-proof container-proof versions-proof docs dist site format sbom audit clean

help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: ## Install missing Debian packages (needs root or sudo if one is missing)
	@command -v dpkg-query >/dev/null || { echo "deps: not a Debian system; docs/deploy.md lists the requirements"; exit 0; }; \
	want="$(APT_RUN) $(APT_BUILD) $(APT_TEST) $(APT_MORE)"; \
	if $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then :; \
	else want="$$want python3-dev"; fi; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || want="$$want python3-venv"; \
	have=$$(dpkg-query -W -f='$${Package} $${Status}\n' $$want 2>/dev/null || true); \
	missing=(); for package in $$want; do \
		grep -qxF "$$package install ok installed" <<<"$$have" || missing+=("$$package"); \
	done; \
	if (($${#missing[@]} == 0)); then exit 0; fi; \
	as_root=(); if ((EUID != 0)); then as_root=(sudo --preserve-env=DEBIAN_FRONTEND); fi; \
	echo "deps: installing $${missing[*]}"; \
	install=("$${as_root[@]}" apt-get install -y -q --no-install-recommends "$${missing[@]}"); \
	log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	"$${install[@]}" >"$$log" 2>&1 || { "$${as_root[@]}" apt-get update -q >"$$log" 2>&1 && "$${install[@]}" >"$$log" 2>&1; } \
		|| { tail -n 30 "$$log" >&2; exit 1; }

TO_SERVE := '.[fake,trainer]'
TO_DEVELOP := --editable '.[host,trainer,dev]'
# Installs into $(VENV) by uv, which takes a tenth of pip's processor time; by pip where uv cannot: uv does not read pip's
# settings, which may name the only index that this host reaches.
install = { $(BIN)/python -m pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(1); } 2>/dev/null \
	|| $(BIN)/python -m pip install --quiet $(1)

# Real desktops in containers where these are installed; REAL= for drawn ones.
REAL ?= $(shell type runc newuidmap mmdebstrap >/dev/null 2>&1 && echo --real)

quickstart: ## Serve desktops and play one episode, without root: drawn, or real in containers (REAL= for drawn); makes .venv unless it exists
	@[[ -x $(BIN)/envd ]] || { $(PYTHON) -m venv $(VENV) && echo "quickstart: installing into $(VENV)" \
		&& { $(call install,$(TO_SERVE)); }; }
	@# Ctrl-C is how it ends.
	@$(BIN)/envd quickstart $(REAL) || (($$? == 130))

venv: $(STAMP) ## Create .venv with envd, trainer and the tools (compiles libvirt-python: run make deps first)

$(STAMP): pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python {v[0]}.{v[1]} is too old: 3.11 is needed; set PYTHON=")'
	@[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	@echo "venv: installing into $(VENV)"
	@$(call install,$(TO_DEVELOP))
	@touch $@

# Debian's package would also install and start a server.
$(PROMTOOL): | $(STAMP)
	@command -v apt-get >/dev/null || { echo "promtool: install it by hand: $@ is missing"; exit 1; }
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; cd "$$dir"; \
	get=(apt-get -qq -o APT::Sandbox::User=root download prometheus); "$${get[@]}" 2>/dev/null || { apt-get update -qq; "$${get[@]}"; }; \
	dpkg-deb -x prometheus_*.deb .; install usr/bin/promtool $(CURDIR)/$@

image: $(STAMP) ## Build the desktop image unless it is cached (minutes, needs root)
	@$(BIN)/envd image build desktop

wine: APT_MORE := $(APT_WINE)
wine: deps $(STAMP) ## Build the image with Wine, a stand-in for Windows (minutes, needs root)
	@$(BIN)/envd image build wine

osworld: deps $(STAMP) ## Install OSWorld: its package, its task files and an image for them (minutes, 3 GB, needs root)
	@$(BIN)/envd image build osworld
	@tasks="$(OSWORLD)"; if [[ -z "$$tasks" ]]; then \
		registered=$$($(BIN)/envd osworld install --json | $(PYTHON) -c 'import json, sys; print(json.load(sys.stdin)["tasks"])'); \
		[[ -n "$$registered" ]] || tasks=$(OSWORLD_URL); \
	fi; \
	if [[ -n "$$tasks" ]]; then $(BIN)/envd osworld install --tasks "$$tasks"; fi

web: deps $(STAMP) ## Install the proxy of web recordings unless it is installed (132 MB)
	@$(BIN)/envd web install

demo: deps $(STAMP) ## Fork and branch episodes on real machines, check their rewards, write out/demo/
	@$(BIN)/envd demo --out $(OUT)

serve: deps $(STAMP) image ## Serve a pool of 2 desktops in the foreground
	@$(BIN)/envd serve --pool 2

# Two tests at once; the tests of a file run in one process and share its fixtures.
BY_TWO := -n 2 --dist loadfile
# Those without real machines often wait for processes and limits, so more of them run at once; tests/conftest.py orders them.
BESIDE_VM := -n 5 --dist loadfile --no-loadscope-reorder
# Collecting all tests takes each process 7 s. In a fresh clone one process does it first and caches what pytest makes of
# the modules: else each of five would, for 25 s more of CPU time.
CACHE_MODULES = compgen -G 'tests/unit/__pycache__/test_sizes.*.pyc' >/dev/null \
	|| nice -n 5 $(BIN)/python -m pytest --collect-only -qq tests | tail -n 20 || exit 2
VM_FILES = $$(grep -rlE --include='test_*.py' 'mark\.vm\b|real_backend' tests)

# Tests on real machines often wait for guests, so the other tests run at the same time, and their output follows at the
# end. They run at low priority: without CPU time, emulated guests take minutes instead of seconds. mypy gets what they
# leave idle.
define RUN_TESTS
log=$$(mktemp); set -m; { $(CACHE_MODULES); nice -n 5 $(BIN)/python -m pytest $(BESIDE_VM) $(1) -m "not vm and not container" tests & tests=$$!; \
	failed=0; nice -n 15 $(MYPY) || failed=$$?; wait $$tests || failed=$$?; exit $$failed; } \
	>"$$log" 2>&1 & others=$$!; set +m; \
trap 'kill -INT -- -$$others 2>/dev/null || true; wait $$others || true; rm -f "$$log"' EXIT; trap 'exit 130' INT TERM; \
status=0; $(BIN)/python -m pytest $(BY_TWO) $(1) -m "vm and not container" $(VM_FILES) || status=$$?; \
wait $$others || status=$$?; cat "$$log"; exit $$status
endef

test: deps $(STAMP) $(PROMTOOL) lint imports proto image web ## Run static checks, then all tests, including those on real machines
	@$(call RUN_TESTS)

test-long: APT_MORE := $(APT_WINE) $(APT_BROWSER)
test-long: export ENVD_TEST_TASKS := all
test-long: deps $(STAMP) $(PROMTOOL) lint imports proto image osworld wine web ## Run `test` with every task, the soak and the faults on real machines (LANE=2/3: a part)
	@progress=$$($(PYTHON) docs/proofs.py progress $@); $(call RUN_TESTS,--long $(LANE:%=--lane %) $${progress:+--progress "$$progress"})
	@$(if $(LANE),echo "$@: lane $(LANE); not recorded",$(RECORD) $@)

test-full: test-long ## Run `test-long` and the proofs
	@$(MAKE) hosts-proof container-proof versions-proof adapters-proof
	@if [[ -n "$(SLIME_CHECKOUT)" ]]; then $(MAKE) slime-proof SLIME_TESTS=slime && $(MAKE) sglang-proof; \
	else echo "test-full: NOT RUN: slime-proof, sglang-proof; run $(BIN)/trainer learn setup, or set SLIME_HOME"; fi
	@if [[ -n "$${SEEDS:-}" ]]; then $(MAKE) compat-proof; \
	else echo "test-full: NOT RUN: compat-proof; set SEEDS to a directory of checkouts"; fi
	@if [[ -f "$(OSWORLD)/run.py" ]]; then $(MAKE) osworld-agents-proof; \
	else echo "test-full: NOT RUN: osworld-agents-proof; set OSWORLD to a checkout of OSWorld"; fi

SLIME_TESTS ?= slime and not vm

slime-proof: deps $(SLIME_STAMP) ## Test the trainer with slime's rollout code on this CPU (SLIME_HOME: a checkout; default: of `trainer learn setup`)
	@[[ -d "$(SLIME_CHECKOUT)/slime/rollout" ]] \
		|| { echo "slime-proof: no checkout of slime; run $(BIN)/trainer learn setup, or set SLIME_HOME" >&2; exit 1; }
	@SLIME_HOME="$(SLIME_CHECKOUT)" $(SLIME_VENV)/bin/python -m pytest --long -m "$(SLIME_TESTS)" tests/slime
	@case "$(SLIME_TESTS)" in slime|"slime and not vm") $(RECORD) $@;; *) echo "$@: a part of it; not recorded";; esac

$(SLIME_STAMP): tests/slime/requirements.txt pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@[[ -x $(SLIME_VENV)/bin/python ]] || $(PYTHON) -m venv $(SLIME_VENV)
	@echo "slime-proof: installing into $(SLIME_VENV)"
	@$(SLIME_VENV)/bin/python -m pip install --quiet --editable '.[host,trainer,dev]' -r tests/slime/requirements.txt
	@touch $@

sglang-proof: deps $(SGLANG_STAMP) ## Test the trainer with SGLang's own server on this CPU (SLIME_HOME: a checkout, as for slime-proof; installs 5 GB)
	@[[ -d "$(SLIME_CHECKOUT)/slime/rollout" ]] \
		|| { echo "sglang-proof: no checkout of slime; run $(BIN)/trainer learn setup, or set SLIME_HOME" >&2; exit 1; }
	@SLIME_HOME="$(SLIME_CHECKOUT)" $(SGLANG_VENV)/bin/python -m pytest --long -m sglang tests/sglang
	@$(RECORD) $@

$(SGLANG_STAMP): tests/sglang/requirements.txt pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@[[ -x $(SGLANG_VENV)/bin/python ]] || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "sglang-proof: installing into $(SGLANG_VENV)"
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --editable '.[host,trainer,dev]' -r tests/sglang/requirements.txt
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==0.5.15.post1
	@touch $@

# kubectl may be another package's.
container-proof: APT_MORE = podman buildah runc conmon $(shell command -v kubectl >/dev/null || echo kubernetes-client)
container-proof: deps $(STAMP) image ## Build the daemon's container image with podman and run machines in it (minutes, needs root)
	@$(BIN)/python -m pytest --long -m container tests/container
	@$(RECORD) $@

areal-proof: deps $(AREAL_STAMP) ## Test the trainer with AReaL's rollout code on this CPU
	@$(AREAL_VENV)/bin/python -m pytest -m areal tests/areal
	@$(RECORD) $@

$(AREAL_STAMP): tests/areal/requirements.txt pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@[[ -x $(AREAL_VENV)/bin/python ]] || $(PYTHON) -m venv $(AREAL_VENV)
	@echo "areal-proof: installing into $(AREAL_VENV)"
	@$(AREAL_VENV)/bin/python -m pip install --quiet --editable '.[host,trainer,dev]' -r tests/areal/requirements.txt
	@$(AREAL_VENV)/bin/python -m pip install --quiet --no-deps areal==1.0.4
	@touch $@

adapters-proof: $(RUN_ADAPTERS:%=.venv-adapters-%/.installed) ## Test the adapters with the frameworks' own packages (ADAPTERS: some of them)
	@$(if $(filter-out $(RUN_ADAPTERS),$(ADAPTERS)),echo "adapters-proof: NOT RUN: harbor; install Python 3.12 or set PYTHON312 to its path")
	@for name in $(RUN_ADAPTERS); do echo "adapters-proof: $$name"; \
		PATH="$$PWD/.venv-adapters-$$name/bin:$$PATH" python -m pytest --long tests/adapters/$$name; \
		$(RECORD) $@/$$name; done

# Not a proof: releases change. A result is for the maintainers, who move the pins.
adapters-newest: deps ## Test the adapters with the newest releases of their frameworks, and list what breaks (ADAPTERS: some of them)
	@$(PYTHON) tests/adapters/newest.py $(RUN_ADAPTERS)

.venv-adapters-%/.installed: tests/adapters/requirements/%.txt tests/adapters/common.txt pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@[[ -x .venv-adapters-$*/bin/python ]] || $(if $(filter harbor,$*),$(PYTHON312),$(PYTHON)) -m venv .venv-adapters-$*
	@echo "adapters-proof: installing into .venv-adapters-$*"
	@.venv-adapters-$*/bin/python -m pip install --quiet --upgrade --editable '.[fake,trainer]' -r tests/adapters/common.txt \
		-r $(if $(NEWEST),<(sed '/^torch==/!s/==.*//' $<),$<)
	@touch $@

compat-proof: deps $(STAMP) ## Test the compatibility protocols with other systems' own clients (SEEDS: a directory of checkouts)
	@[[ -d "$${SEEDS:-}" ]] || { echo "compat-proof: set SEEDS to a directory of checkouts; see docs/evidence/clients.md" >&2; exit 1; }
	@$(BIN)/python -m pytest --long -m seeds tests/seeds
	@$(RECORD) $@

osworld-agents-proof: deps $(STAMP) ## Test OSWorld's own runner and agent on a real machine (OSWORLD: a checkout; needs root; installs 1.5 GB)
	@[[ -f "$(OSWORLD)/run.py" && -f "$(OSWORLD)/scripts/python/run_multienv.py" ]] || { echo "osworld-agents-proof:" \
		"OSWORLD '$(OSWORLD)': no checkout with run.py and scripts/python/run_multienv.py; clone $(OSWORLD_URL)" \
		"and set OSWORLD to the directory" >&2; exit 1; }
	@$(MAKE) $(AGENTS_STAMP)
	@$(BIN)/envd image build osworld
	@OSWORLD="$(abspath $(OSWORLD))" OSWORLD_AGENTS_PYTHON="$$PWD/$(AGENTS_VENV)/bin/python" \
		$(BIN)/python -m pytest --long -m osworld_agents tests/osworld_agents
	@$(RECORD) $@

$(AGENTS_STAMP): tests/osworld_agents/requirements.txt envd/integrations/osworld/requirements.txt pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@[[ -x $(AGENTS_VENV)/bin/python ]] || $(PYTHON) -m venv $(AGENTS_VENV)
	@echo "osworld-agents-proof: installing into $(AGENTS_VENV)"
	@$(AGENTS_VENV)/bin/python -m pip install --quiet --editable '.[trainer]' -r envd/integrations/osworld/requirements.txt -r tests/osworld_agents/requirements.txt
	@touch $@

hosts-proof: deps $(RAY_STAMP) image ## Test many hosts in a Ray cluster on this machine, and a short simulation
	@$(RAY_VENV)/bin/python -m pytest --long -m ray tests/ray
	@$(RAY_VENV)/bin/python -m pytest tests/unit/simulation tests/contract/test_placement.py
	@$(RECORD) $@

$(RAY_STAMP): pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@[[ -x $(RAY_VENV)/bin/python ]] || $(PYTHON) -m venv $(RAY_VENV)
	@echo "hosts-proof: installing into $(RAY_VENV)"
	@$(RAY_VENV)/bin/python -m pip install --quiet --editable '.[host,trainer,ray,dev]'
	@touch $@

versions-proof: deps $(PROMTOOL) $(VERSIONS:%=.venv-python-%/.installed) ## Run the unit tests, and whole programs on drawn desktops, by newer versions of Python (VERSIONS: some of 3.12 3.13)
	@for version in $(VERSIONS); do echo "versions-proof: $$version"; ln -sf ../../$(PROMTOOL) .venv-python-$$version/bin/; \
		progress=$$($(PYTHON) docs/proofs.py progress $@/$$version); \
		.venv-python-$$version/bin/python -m pytest $(BY_TWO) $${progress:+--progress "$$progress"} \
			tests/unit tests/fuzz tests/e2e/test_cli_quickstart.py tests/e2e/test_evaluate_fake.py; \
		$(RECORD) $@/$$version; done

.venv-python-%/.installed: pyproject.toml hatch_build.py $(wildcard proto/cuaenv/v1/*.proto) | deps
	@[[ -n "$(call python_of,$*)" ]] || { echo "versions-proof: no Python $*; install it by your distribution or pyenv, or set VERSIONS" >&2; exit 1; }
	@[[ -x .venv-python-$*/bin/python ]] || "$(call python_of,$*)" -m venv .venv-python-$*
	@echo "versions-proof: installing into .venv-python-$*"
	@.venv-python-$*/bin/python -m pip install --quiet --editable '.[host,trainer,dev]'
	@touch $@

check: deps $(STAMP) $(PROMTOOL) lint types imports proto unit ## Run static checks and unit tests

lint: $(STAMP) ## Check style (ruff), spelling (codespell) and wording (docs/style/banned-phrases.txt)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .
	@$(BIN)/codespell
	@# Prompts are part of what models were trained on: rewording them changes prompt_hash.
	@if git grep -nIiP -f docs/style/banned-phrases.txt -- '*.py' '*.md' '*.proto' ':!trainer/agent/system_prompt.py'; then \
		echo "lint: plain English, please: see docs/style/banned-phrases.txt and CONTRIBUTING.md" >&2; exit 1; fi

types: $(STAMP) ## Check types (mypy)
	@$(MYPY)

imports: $(STAMP) ## Check import contracts (import-linter)
	@$(BIN)/lint-imports

# The contract of the last release, which `make release` replaces.
RELEASED := proto/released.binpb

proto: $(STAMP) ## Lint the contract, and compare it with that of the last release (buf)
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against $(RELEASED)

unit: $(STAMP) $(PROMTOOL) ## Run unit tests and fixed examples of the fuzz tests: milliseconds each, no machines
	@$(BIN)/python -m pytest tests/unit tests/fuzz

FUZZ_MINUTES ?= 10

# `test` tries fixed examples of the same tests. Here each round tries five times as many, random ones.
fuzz: $(STAMP) ## Fuzz the parsers of all untrusted input for FUZZ_MINUTES (10), until one fails
	@for ((round = 1; SECONDS < 60 * $(FUZZ_MINUTES); round++)); do echo "fuzz: round $$round"; \
		FUZZ=1 $(BIN)/python -m pytest $(BY_TWO) -q tests/fuzz; done

SOAK ?= --hypervisor fake --minutes 10
SIMULATE ?= --hosts 1,2,10

soak: deps $(STAMP) ## Play random episodes under random faults (SOAK: options; by default 10 minutes on drawn desktops)
	@$(BIN)/python -m tests.soak $(SOAK)

simulate: $(STAMP) ## Simulate many hosts on a virtual clock (SIMULATE: options)
	@$(BIN)/python -m tests.simulation $(SIMULATE)

vm-test: deps $(STAMP) image ## Run only the tests on real machines
	@$(BIN)/python -m pytest $(BY_TWO) -m vm $(VM_FILES)

docs: $(STAMP) ## Write the generated pages (API, client, settings, metrics, suite, proofs) to out/docs/, and the plots of docs/benchmarks.md
	@$(BIN)/python docs/generate.py out/docs && $(BIN)/envd bench plot docs/benchmarks

VERSION = $$($(BIN)/envd --version | cut -d' ' -f2)
# The bytes of an archive depend on the commit alone: its time is that of every file in it.
BUILD = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir

dist: $(STAMP) sbom ## Build the wheel and the source distribution, with SBOM, checksums and notes: out/dist/
	@rm -rf out/dist out/dist-again
	@$(BUILD) out/dist . >/dev/null && $(BUILD) out/dist-again . >/dev/null
	@diff -r out/dist out/dist-again || { echo "dist: two builds of one commit differ" >&2; exit 1; }
	@rm -r out/dist-again; cp out/sbom.json out/dist/; cd out/dist && sha256sum * >SHA256SUMS
	@version=$(VERSION); [[ $$version != *.dev* ]] || version=Unreleased; \
		awk -v want="## $$version" 'index($$0, want) == 1 {on = 1; next} /^## / {on = 0} on' CHANGELOG.md >out/dist/NOTES.md; \
		[[ -s out/dist/NOTES.md ]] || { echo "dist: CHANGELOG.md has no section for $$version" >&2; exit 1; }
	@ls -l out/dist

release: $(STAMP) ## Run the tests and proofs that have not passed on this commit, then build the site and out/dist/
	@[[ $(VERSION) != *.dev* ]] || { echo "release: $(VERSION): not a release; remove .dev0 in pyproject.toml" >&2; exit 1; }
	@todo=$$($(PYTHON) docs/proofs.py missing); for target in $$todo; do $(MAKE) $$target; done
	@left=$$($(PYTHON) docs/proofs.py missing); [[ -z "$$left" ]] \
		|| { echo "release: not passed on this commit: $$left; see what they need by make help" >&2; exit 1; }
	@$(MAKE) site dist
	@$(BIN)/buf build --exclude-source-info -o $(RELEASED)
	@echo "release: commit $(RELEASED) and docs/proofs.json, then tag v$(VERSION), push the tag, and begin the next version's .dev0 in pyproject.toml"

site: $(STAMP) ## Build the documentation as a searchable site: out/site/index.html
	@log=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build 2>&1) || { echo "$$log" >&2; exit 1; }; echo "site: out/site/index.html"

format: $(STAMP) ## Format the code and fix lint errors
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

$(AUDIT_STAMP): | deps
	@[[ -x $(AUDIT_VENV)/bin/python ]] || $(PYTHON) -m venv $(AUDIT_VENV)
	@echo "audit: installing into $(AUDIT_VENV)"
	@$(AUDIT_VENV)/bin/python -m pip install --quiet 'cyclonedx-bom>=7' 'pip-audit>=2.9'
	@touch $@

sbom: $(STAMP) $(AUDIT_STAMP) ## Write out/sbom.json, a CycloneDX list of the packages in .venv and their licences
	@mkdir -p out && $(AUDIT_VENV)/bin/cyclonedx-py environment --of JSON -o out/sbom.json $(BIN)/python
	@echo "sbom: out/sbom.json"

audit: $(STAMP) $(AUDIT_STAMP) ## Check the packages in .venv for known vulnerabilities (asks a database on the internet)
	@list=$$(mktemp); trap 'rm -f "$$list"' EXIT; $(BIN)/python -m pip list --format freeze --exclude-editable >"$$list"; \
	$(AUDIT_VENV)/bin/pip-audit --strict --disable-pip --no-deps --requirement "$$list"

clean: ## Remove all generated files including .venv; images and state are kept
	@rm -rf $(VENV) $(SLIME_VENV) $(SGLANG_VENV) $(AREAL_VENV) $(RAY_VENV) $(AGENTS_VENV) $(AUDIT_VENV) .venv-adapters-* .venv-python-* out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find envd trainer tests proto -name __pycache__ -type d -prune -exec rm -rf {} +
	@find proto -name '*_pb2*.py*' -delete
