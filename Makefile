# `make` alone lists the targets.
PY := .venv/bin/python
# USER and WORKDIR count only when given on this command line: everybody's
# environment has a USER.  $(value …): a path may hold a dollar sign.
quote = '$(subst ','\'',$(value $1))'
given = $(if $(filter command,$(firstword $(origin $1))),$2 $(call quote,$1))
# As root in a folder of somebody else's (sudo): what is made here is his.
owner = $(filter-out root UNKNOWN,$(shell stat -c %U .))
as_owner = $(if $(filter 0,$(shell id -u)),$(if $(owner),runuser -u $(owner) -- env -u TMPDIR HOME="$$(getent passwd $(owner) | cut -d: -f6)"))

help: ## this list
	@sed -n 's/^\([a-z -]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 34

run: .venv/.runtime ## work through the example in the foreground (state in .agent)
	@$(PY) -m worker run config.example.yaml --state .agent

check: .venv/.dev check-units ## style, types, shell, units
	$(as_owner) $(PY) -m ruff check .
	$(as_owner) $(PY) -m ruff format --check .
	$(as_owner) $(PY) -m mypy --strict worker tests
	@if command -v shellcheck >/dev/null; then shellcheck -x install.sh units/ownership.sh units/hooks.sh worker/*.sh .ci/run; else echo "skipped: no shellcheck here"; fi

# A copy, because the units name a program that need not be installed here.
UNITS := units
check-units: ## units: unknown keys, and more exposure than they are meant to have, are errors
	@if ! command -v systemd-analyze >/dev/null; then echo "skipped: no systemd-analyze here"; exit 0; fi; \
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && set -e; \
	for unit in $(UNITS)/*.service $(UNITS)/*.path; do sed 's#/usr/local/bin/agentctl#/bin/true#' $$unit >$$tmp/$${unit##*/}; done; \
	cp $$tmp/agent.service $$tmp/agent@.service; \
	systemd-analyze verify --man=no --recursive-errors=no $$tmp/*; \
	for unit in agent.service:24 agent-alert@.service:15 agent-thaw@.service:15; do \
	systemd-analyze security --offline=yes --threshold=$${unit#*:} --no-pager $$tmp/$${unit%:*} >$$tmp/table || { cat $$tmp/table; exit 1; }; \
	tail -n 1 $$tmp/table; done; \
	systemd-analyze security --offline=yes --threshold=65 --no-pager $$tmp/agent-supervisor@.service >$$tmp/table || { cat $$tmp/table; exit 1; }; \
	tail -n 1 $$tmp/table

test: .venv/.dev ## every test, about a quarter of an hour; tests/README.md says what needs root
	@$(PY) -m tests all

test-quick: .venv/.dev ## the tests that start no program of ours, in under a minute
	@$(PY) -m tests quick

test-unit test-crash test-system: .venv/.dev ## one tier of them
	@$(PY) -m tests $(@:test-%=%)

crash: .venv/.dev ## kill and fail the worker at its system calls: a sample; CASES=all, SHARD=1/4, CASE=sqlite/write/40/KILL
	@CASES=$(call quote,CASES) CASE=$(call quote,CASE) SHARD=$(call quote,SHARD) $(PY) -m tests.campaign

bench: .venv/.dev ## time per step, beside what it is made of
	$(PY) -m tests.bench

bench-postgres: .venv/.dev ## no-op steps a second with a ledger on a server, beside Procrastinate and Absurd
	$(PY) -m tests.bench.postgres

install: ## install on this machine (root); USER=name WORKDIR=/path: whose work, and where
	@./install.sh install $(call given,USER,--user) $(call given,WORKDIR,--workdir)

uninstall purge: ## remove program and units; purge: configuration and state too
	@./install.sh $@

clean: ## remove what the other targets made
	rm -rf .venv .agent .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.runtime: requirements.lock
	@$(as_owner) ./install.sh venv .venv
	@$(as_owner) touch $@

.venv/.dev: requirements.lock
	@$(as_owner) ./install.sh venv .venv --dev
	@$(as_owner) touch $@ .venv/.runtime

# The service needs the first section; the second builds what has no wheel, the third is for `http:` steps, the
# fourth for a ledger on a server.
COMPILE = uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url
lock: ## write requirements.lock anew (needs uv)
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && set -e; \
	echo 'setuptools>=70.1' >$$tmp/build.in; \
	$(COMPILE) pyproject.toml >$$tmp/runtime; \
	$(COMPILE) $$tmp/build.in >$$tmp/build; \
	$(COMPILE) pyproject.toml --extra http -c $$tmp/runtime >$$tmp/http; \
	$(COMPILE) pyproject.toml --extra postgres -c $$tmp/http >$$tmp/postgres; \
	cat $$tmp/http $$tmp/postgres >$$tmp/extras; \
	$(COMPILE) pyproject.toml --extra dev -c $$tmp/http -c $$tmp/postgres >$$tmp/dev; \
	without() { awk 'NR == FNR { if (/==/) seen[$$1] = 1; next } /==/ { keep = !($$1 in seen) } keep' $$tmp/$$1 $$tmp/$$2; }; \
	{ echo '# Exact versions with hashes, written by `make lock`.  install.sh reads it by section.'; \
	echo '# == runtime =='; cat $$tmp/runtime; echo '# == build =='; cat $$tmp/build; \
	echo '# == http =='; without runtime http; echo '# == postgres =='; without runtime postgres; \
	echo '# == development =='; without extras dev; } >$$tmp/lock; \
	cp $$tmp/lock requirements.lock

.PHONY: help run check check-units test test-quick test-unit test-crash test-system crash bench bench-postgres install uninstall purge clean lock
