# Sourced by every command: finds or makes the Python environment, and sets `baton_python` to its interpreter.
#
# 1. An active environment (VIRTUAL_ENV, CONDA_PREFIX) that meets the requirements is used as it is.
# 2. Otherwise the .venv of the checkout, if its stamp matches pyproject.toml, constraints.txt and its Python.
# 3. Otherwise the python3 on the PATH, if it meets the requirements.
# 4. Otherwise .venv is made or updated, once. Commands started meanwhile wait for it.
#
# A command that needs an extra, such as "dev", sets baton_extra=dev before sourcing. BATON_VENV is used in place of .venv.
# torch is installed first and separately: without a GPU in its CPU build (200 MB), if pip finds one, instead of the CUDA
# build of the package index (several GB). BATON_TORCH_INDEX adds an index of CPU builds or of another CUDA version.

baton_root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
baton_extra=${baton_extra:-}
baton_venv=${BATON_VENV:-$baton_root/.venv}
case $baton_venv in /*) ;; *) baton_venv=$PWD/$baton_venv ;; esac # a command may change the folder
baton_lock=$baton_root/scripts/setup.sh # this file is locked during installation

# Without these, a signal to this shell alone would take effect only after the running program has ended.
trap 'exit 130' INT
trap 'exit 143' TERM

baton_fail() {
    printf 'baton: %s\n' "$*" >&2
    exit 1
}

baton_requirements() { # PYTHON [OPTION...]
    "$1" -I "$baton_root/scripts/requirements.py" "${@:2}" "$baton_root/pyproject.toml" ${baton_extra:+"$baton_extra"}
}

baton_meets() { # PYTHON [--pins FILE]: does this interpreter meet the requirements?
    [ -x "$1" ] && baton_requirements "$@" > /dev/null 2>&1
}

baton_is_set_up() { # is the environment complete, and its Python still the one that completed it?
    [ -x "$baton_python" ] && [ "$(cat "$baton_stamp" 2> /dev/null)" = "$(readlink -f "$baton_python")" ]
}

baton_new_python() { # prints an interpreter for a new environment
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        name=$(command -v "$name") || continue
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && { printf '%s' "$name"; return; }
    done
    baton_fail "Python 3.11 or newer is needed and none is on the PATH." \
        "Install it (Debian, Ubuntu: apt install python3 python3-venv) and run this again."
}

baton_pip() {
    "$baton_venv/bin/python" -m pip install --disable-pip-version-check --no-input -c "$baton_root/constraints.txt" "$@" >&2
}

baton_install_torch() {
    local pin index=${BATON_TORCH_INDEX:-}
    pin=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$baton_root/constraints.txt")
    "$baton_venv/bin/python" -c "from importlib.metadata import version
exit(version('torch').split('+')[0] != '$pin')" 2> /dev/null && return
    if [ "$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia/version ] && ! command -v nvidia-smi > /dev/null; then
        if baton_finds ${index:+--extra-index-url "$index"} "torch==$pin+cpu"; then
            pin=$pin+cpu
        else
            printf 'baton: installing the CUDA build of torch, several GB; set BATON_TORCH_INDEX to the index of CPU builds\n' >&2
            printf 'baton: that pytorch.org names to install 200 MB instead\n' >&2
        fi
    fi
    baton_pip ${index:+--extra-index-url "$index"} "torch==$pin"
}

baton_finds() { # could pip install this?
    "$baton_venv/bin/python" -m pip install --disable-pip-version-check --no-input --dry-run --no-deps -q "$@" > /dev/null 2>&1
}

baton_install() {
    local base began=$SECONDS requirements stale
    if ! "$baton_python" -c 'import pip' 2> /dev/null; then
        if baton_meets "$baton_python"; then # it is of another tool, such as uv
            readlink -f "$baton_python" > "$baton_stamp"
            return
        fi
        base=$(baton_new_python) || exit 1
        [ -e "$baton_venv/pyvenv.cfg" ] || [ -z "$(ls -A "$baton_venv" 2> /dev/null)" ] || baton_fail \
            "$baton_venv has other files than those of an environment: empty it, or name another folder as BATON_VENV"
        printf 'baton: making an environment in %s with %s\n' "$baton_venv" "$("$base" --version)" >&2
        "$base" -m venv --clear "$baton_venv" >&2 || baton_fail "making it failed: does $base have the module venv" \
            "(Debian, Ubuntu: apt install python3-venv), and may you write there, with room on the disk?" \
            "BATON_VENV names another folder."
    fi
    if ! baton_meets "$baton_venv/bin/python" --pins "$baton_root/constraints.txt"; then
        printf 'baton: installing packages, once; this takes a few minutes\n' >&2
        baton_install_torch || baton_fail "cannot install torch; see the output of pip above. Run this again to continue."
        requirements=$(baton_requirements "$baton_venv/bin/python" --list) || baton_fail "cannot read pyproject.toml"
        # shellcheck disable=SC2086
        baton_pip $requirements || baton_fail "cannot install packages; see the output of pip above. Run this again to continue."
        printf 'baton: set up in %d s\n' "$((SECONDS - began))" >&2
    fi
    # Keep the stamps of other extras; remove those of other versions of the two files.
    for stale in "$baton_venv"/.baton-*; do
        case $stale in "$baton_plain_stamp" | "$baton_plain_stamp"-*) ;; *) rm -f "$stale" ;; esac
    done
    readlink -f "$baton_python" > "$baton_stamp"
    readlink -f "$baton_python" > "$baton_plain_stamp"
}

baton_find() {
    local active hash
    hash=$(cat "$baton_root/pyproject.toml" "$baton_root/constraints.txt" | cksum) || exit 1
    baton_plain_stamp=$baton_venv/.baton-${hash%% *}
    baton_stamp=$baton_plain_stamp${baton_extra:+-$baton_extra}
    baton_python=$baton_venv/bin/python
    for active in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
        [ -n "$active" ] && [ "$active" != "$baton_venv" ] && baton_meets "$active/bin/python" && {
            baton_python=$active/bin/python
            return
        }
    done
    baton_is_set_up && return
    active=$(command -v python3) && baton_meets "$active" && {
        baton_python=$active
        return
    }
    # Another command may be installing: wait for it, then look again.
    exec 9< "$baton_lock"
    command -v flock > /dev/null && ! flock -n 9 && {
        printf 'baton: another command is setting up %s; waiting for it\n' "$baton_venv" >&2
        flock 9
    }
    baton_is_set_up || baton_install
    exec 9<&-
}

baton_find
# Do not import a folder of the user that is called common: -P for this process and its children.
export PYTHONSAFEPATH=1 PYTHONPATH="$baton_root${PYTHONPATH:+:$PYTHONPATH}"
