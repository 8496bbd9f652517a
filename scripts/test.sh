#!/usr/bin/env bash
# Installs the test extras into .venv and runs every check: bash scripts/test.sh [PYTEST ARGUMENTS]
# The slow tests are left out; -m slow runs them.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install test

export JAX_PLATFORMS=cpu      # with libtpu installed, JAX would look for a TPU
export JAX_COMPILATION_CACHE_DIR="$PWD/.jax_cache"

# every check runs, so that one failure does not hide another
failed=()
.venv/bin/ruff check . || failed+=(ruff)
bash scripts/typecheck.sh || failed+=(mypy)
.venv/bin/pytest -n "${TEST_WORKERS:-2}" "$@" || failed+=(pytest)
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
