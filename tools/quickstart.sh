#!/usr/bin/env bash
# Make an environment, install the package and train recipes/llama_tiny_mxfp8.toml on this machine.
#   TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu bash tools/quickstart.sh   # no CUDA download
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment .venv ""
exec torchrun --nproc_per_node=1 -m torchtitan.train --job.config recipes/llama_tiny_mxfp8.toml "$@"
