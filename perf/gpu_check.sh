#!/usr/bin/env bash
# What a device does with Covey, from a bare checkout: nothing is installed, at most 8 minutes.
#
#   perf/gpu_check.sh OUT.json            on whatever device JAX finds
#   perf/gpu_check.sh OUT.json --quick    the same in small, seconds on a processor
#
# Needs Python 3.11 or later with jax and numpy. Exit status 1: bits differ, or a part failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1
# Memory as it is needed, so that what the budget says can be seen from outside.
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}"
exec "${PYTHON:-python3}" -m perf.gpu_check "$@"
