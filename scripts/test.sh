#!/usr/bin/env bash
# Installs the test extras into .venv-test and runs every check: bash scripts/test.sh [PYTEST ARGUMENTS]
# The slow tests are left out; -m slow runs them. The environment is apart from .venv because it holds libtpu, which makes
# JAX look for a TPU at every start.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install .venv-test test

export JAX_PLATFORMS=cpu

# every check runs, so that one failure does not hide another
failed=()
.venv-test/bin/ruff check . || failed+=(ruff)
MYPY=.venv-test/bin/mypy bash scripts/typecheck.sh || failed+=(mypy)
.venv-test/bin/pytest -n "${TEST_WORKERS:-2}" --dist loadgroup "$@" || failed+=(pytest)
[ $# -gt 0 ] || timeout 1200 .venv-test/bin/pytest -m mesh tests/laws/test_mesh.py tests/test_api.py tests/test_scoring.py tests/scripts/test_train_lm.py || failed+=("pytest -m mesh")
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
