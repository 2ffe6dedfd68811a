#!/usr/bin/env bash
# Make an environment, install the package with its test tools and run every check and CPU test.
#   TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu bash tools/test.sh   # no CUDA download
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment .venv-test "dev"
exec python tools/check.py --all "$@"
