#!/usr/bin/env bash
# Installs the test extras into .venv-test and runs every check:
#
#     bash scripts/test.sh                      each law on its smallest cases: within 15 minutes on 2 cores
#     bash scripts/test.sh --wide               what that leaves out and CI runs as well: up to an hour
#     bash scripts/test.sh --all                the rest: every parameter, statistics, every mesh: hours
#     bash scripts/test.sh PYTEST ARGUMENTS     the tests that pytest selects
#
# Tests that need a GPU run by `pytest -m gpu` alone. The environment is apart from .venv because it holds libtpu, which
# makes JAX look for a TPU at every start. $VENV names another one, $PYTHON another interpreter than the newest suitable:
#
#     PYTHON=python3.11 VENV=.venv-test-3.11 bash scripts/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
venv=${VENV:-.venv-test}
install "$venv" test

export JAX_PLATFORMS=cpu

# tests with collectives run in processes without torch, where JAX's CPU collectives do not crash
mesh="mesh and not wide and not full"
mesh_files=($(grep -rl --include='test_*.py' 'mark\.mesh' tests | sort))
limit=1200
types=1
if [ "${1:-}" = --wide ]; then
    shift
    types=
    "$venv/bin/python" scripts/real_models.py || echo "tests of real models are skipped" >&2
    set -- -m "wide and not full and not mesh and not gpu" "$@"
    mesh="mesh and wide and not full"
elif [ "${1:-}" = --all ]; then
    shift
    set -- -m "not mesh and not gpu" "$@"
    mesh=mesh
    limit=3600
    export TEST_AS_SHIPPED=1      # compiled as for users, which takes longer: see tests/conftest.py
elif [ $# -gt 0 ]; then
    mesh=
fi

# every check runs, so that one failure does not hide another. A test process that dies ends the run: pytest-xdist would
# wait for ever for the one in its place. mypy runs beside the tests of meshes, whose processes wait for each other's
# devices; --wide leaves it to the run without
failed=()
"$venv/bin/ruff" check . || failed+=(ruff)
"$venv/bin/pytest" -n "${TEST_WORKERS:-2}" --dist loadgroup --max-worker-restart 0 "$@" || failed+=(pytest)
[ -z "$types" ] || { MYPY=$venv/bin/mypy bash scripts/typecheck.sh & types=$!; }
[ -z "$mesh" ] || timeout "$limit" "$venv/bin/pytest" -n "${TEST_WORKERS:-2}" --dist loadgroup \
    --max-worker-restart 0 -m "$mesh" "${mesh_files[@]}" || failed+=("pytest -m mesh")
[ -z "$types" ] || wait "$types" || failed+=(mypy)
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
