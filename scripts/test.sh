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
mesh_files=(tests/laws/test_mesh.py tests/front/test_api.py tests/front/test_scoring.py tests/scripts/test_train_lm.py
            tests/pallas_kernels/test_vocabulary.py tests/pallas_kernels/test_draw.py
            tests/pallas_kernels/test_packed_matmul.py tests/sampling/test_truncation.py
            tests/models/formats/test_packed_mesh.py
            tests/caches/test_policies_mesh.py tests/jobs/test_slots_mesh.py tests/algorithms/beams/test_beams_mesh.py
            tests/scripts/test_grpo.py tests/scripts/test_train_drafter.py
            tests/models/test_experts_mesh.py tests/models/test_adapters_mesh.py tests/models/test_dual_chunk_mesh.py
            tests/models/test_linear_mesh.py tests/models/latent/test_latent_mesh.py
            tests/models/families/test_image_prompts_mesh.py tests/models/families/test_gemma4_mesh.py
            tests/models/families/test_gpt_oss_mesh.py
            tests/models/encoder_decoder/test_encoder_decoder_mesh.py tests/models/recurrent/test_gated_delta_mesh.py tests/models/recurrent/test_hybrids_mesh.py
            tests/io/quantised/test_quantised_mesh.py tests/drafters/test_heads_mesh.py
            tests/caches/context/test_context_parallel_mesh.py tests/laws/test_vocabulary_mesh.py tests/laws/test_sequence_mesh.py
            tests/algorithms/speculative/test_apart_mesh.py tests/laws/test_weave_mesh.py
            tests/algorithms/speculative/test_split_mesh.py)
limit=1200
if [ "${1:-}" = --wide ]; then
    shift
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
# devices
failed=()
"$venv/bin/ruff" check . || failed+=(ruff)
"$venv/bin/pytest" -n "${TEST_WORKERS:-2}" --dist loadgroup --max-worker-restart 0 "$@" || failed+=(pytest)
MYPY=$venv/bin/mypy bash scripts/typecheck.sh & types=$!
[ -z "$mesh" ] || timeout "$limit" "$venv/bin/pytest" -n "${TEST_WORKERS:-2}" --dist loadgroup \
    --max-worker-restart 0 -m "$mesh" "${mesh_files[@]}" || failed+=("pytest -m mesh")
wait "$types" || failed+=(mypy)
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
