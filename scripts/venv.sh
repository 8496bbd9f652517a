# Sourced by the other scripts: a virtual environment with decodax installed from this directory.

# install VENV EXTRAS: makes the environment if need be and installs decodax with these extras ("" for none), unless
# that was done for this pyproject.toml before. $PYTHON names the interpreter to use; default: the newest suitable one.
# An environment that is there is kept, unless $PYTHON asks for another version.
install() {
    local venv=$1 extras=$2 python want stamp=$1/.installed
    if ! suitable "$venv/bin/python" || { [ -n "${PYTHON:-}" ] && ! same_version "$venv/bin/python" "$PYTHON"; }; then
        python=$(find_python)
        echo "making $venv with $("$python" --version)" >&2
        if ! "$python" -m venv --clear "$venv" >&2; then
            echo "error: $python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)" >&2
            exit 1
        fi
    fi
    want=$("$venv/bin/python" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        echo "installing decodax${extras:+ with the $extras extras}; the first time this takes a few minutes" >&2
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --editable ".${extras:+[$extras]}" >&2
        echo "$want" > "$stamp"
    fi
}

# suitable PYTHON: whether it runs and is a version that decodax supports.
suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# same_version PYTHON PYTHON: whether both are, say, 3.12; where the second cannot be run, find_python says so.
same_version() {
    local version='import sys; print(sys.version_info[:2])'
    [ "$("$1" -c "$version")" = "$("$2" -c "$version" 2>/dev/null)" ]
}

# The newest suitable Python: $PYTHON if set, else python3.13 down to python3.11 on the PATH and among pyenv's versions
# (pyenv's own shims fail for versions that are installed but not switched on), else whatever python3 is.
find_python() {
    local pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions python
    set -- ${PYTHON:+"$PYTHON"}
    [ $# -gt 0 ] || set -- python3.13 "$pyenv"/3.13.*/bin/python python3.12 "$pyenv"/3.12.*/bin/python \
        python3.11 "$pyenv"/3.11.*/bin/python python3 python
    for python in "$@"; do
        if suitable "$python"; then
            echo "$python"
            return
        fi
    done
    echo "error: decodax takes Python 3.11 to 3.13; found ${PYTHON:-python3}: $("${PYTHON:-python3}" --version 2>&1)." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.12 bash $0" >&2
    exit 1
}
