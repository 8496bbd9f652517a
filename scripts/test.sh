#!/usr/bin/env bash
# Installs the test extras into .venv and runs every check: bash scripts/test.sh [PYTEST ARGUMENTS]
# The slow tests are left out; -m slow runs them.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install test

export JAX_PLATFORMS=cpu      # with libtpu installed, JAX would look for a TPU
export JAX_COMPILATION_CACHE_DIR="$PWD/.jax_cache"

.venv/bin/ruff check .
bash scripts/typecheck.sh
.venv/bin/pytest -n "${TEST_WORKERS:-2}" "$@"
