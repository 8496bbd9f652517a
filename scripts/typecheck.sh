#!/usr/bin/env bash
# mypy over the package. models/ and pallas_kernels/ are installed as decodax.models and decodax.pallas_kernels, which an
# editable install hides from mypy, so it is shown a tree of links that looks as installed. MYPY names another mypy.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
mypy=$(realpath -s "${MYPY:-.venv-test/bin/mypy}")
tree=.mypy_cache/tree
rm -rf "$tree" && mkdir -p "$tree/decodax"
ln -s "$root"/decodax/* "$root/models" "$root/pallas_kernels" "$tree/decodax"
cd "$tree"
"$mypy" --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p decodax
