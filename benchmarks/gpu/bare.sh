#!/usr/bin/env bash
# A GPU machine that has PyTorch and transformers and reaches no package index:
#
#   benchmarks/gpu/bare.sh collect .whl              where there is an index: wheels of what it lacks
#   source benchmarks/gpu/bare.sh install .whl SITE  there: put them into SITE, and SITE on PYTHONPATH
#
# `collect` takes the versions that `make setup` installed, for Python ${PYTHON_VERSION:-3.12}. Nothing
# that is on the machine already is replaced: SITE is a folder of its own.
set -euo pipefail

PACKAGES=(
  megatron-core nemo-toolkit lightning hydra-core omegaconf antlr4-python3-runtime
  # what these import
  lightning-utilities torchmetrics wrapt webdataset braceexpand overrides toml StrEnum psutil einops
  nv-one-logger-core nv-one-logger-training-telemetry nv-one-logger-pytorch-lightning-integration
  opentelemetry-api opentelemetry-sdk opentelemetry-proto opentelemetry-semantic-conventions
  opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-common
  googleapis-common-protos protobuf pydantic pydantic-core annotated-types typing-inspection
  rich markdown-it-py mdurl pygments text-unidecode gguf
  # rewards and tests
  math-verify latex2sympy2-extended pytest pytest-timeout pluggy iniconfig
)

collect() {
  local out=$1 python=${VENV:-.venv}/bin/python platforms=() wanted=() tag name version
  declare -A versions
  while IFS== read -r name _ version; do
    name=${name,,}
    versions[${name//_/-}]=$version
  done < <("$python" -m pip list --format freeze --disable-pip-version-check 2>/dev/null)
  mkdir -p "$out"
  for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 \
    manylinux_2_12 manylinux_2_5 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
  done
  for name in "${PACKAGES[@]}"; do
    wanted+=("$name==${versions[${name,,}]:?$name is not in $python; run make setup}")
  done
  # antlr4-python3-runtime is published as source alone: it is built first, then found.
  "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$out" \
    "$(printf '%s\n' "${wanted[@]}" | grep antlr4)"
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" \
    --find-links "$out" -d "$out" "${wanted[@]}"
  du -sh "$out"
}

install() {
  local site
  site=$(mkdir -p "$2" && cd "$2" && pwd)
  ${PYTHON:-python3} -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --disable-pip-version-check --target "$site" "$1"/*.whl
  export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
}

case ${1:-} in
  collect) collect "$2" ;;
  install) install "$2" "$3" ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; false ;;
esac
