#!/usr/bin/env bash
# From a bare machine with Python 3.11 to 3.13 and pip to text from the shipped model:
#   bash scripts/quickstart.sh [PROMPT]
# Installs into .venv once; after that it needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install .venv ""

# no line break at the end: the tokenizer has one token for it and the indentation that follows
prompt=${1:-$'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):'}
.venv/bin/decodax generate "$prompt" --echo --max-new-tokens 160 --temperature 0.7 --top-p 0.95 --algorithm prompt-lookup

cat >&2 <<'END'

Next:  source .venv/bin/activate
       decodax generate "def read_config(path):" --temperature 0.7 --num-samples 3
       decodax generate --help
END
