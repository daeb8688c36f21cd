#!/usr/bin/env bash
# kvbench starts, toggles, resets and compares real vLLM and SGLang servers on this host, and saves the reports:
#   bash tests/live/real_engines/compare.sh FOLDER [RUN...]       FOLDER as install.sh left it; RUN: vllm lmcache mooncake sglang
# Everything runs in a network namespace of its own (needs root), since Mooncake's client listens on every address.
# About 4 minutes a run on two cores with two pairs. Reports go to sample_reports/replay/; PAIRS=5 narrows the intervals.
set -euo pipefail
folder=$(cd "${1:?usage: compare.sh FOLDER [RUN...]}" && pwd)
shift
runs=("$@")
((${#runs[@]})) || runs=(vllm lmcache mooncake sglang)
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
kvbench=${KVBENCH:-.venv/bin/kvbench}
reports=${REPORTS:-sample_reports/replay}
pairs=${PAIRS:-2}
tiers=$(mktemp -d)
trap 'rm -rf "$tiers"' EXIT

# 120 MiB of L1 hold 10,240 tokens of this model: five of the eight prefixes.
common=(eight-prefixes --limit 16 --model "$folder/models/llama-120m" --pairs "$pairs" --engine-arg=--load-format=dummy
  --engine-arg=--dtype=bfloat16 --engine-env HF_HUB_OFFLINE=1 --start-timeout 300s)
# Idle vLLM servers cost memory only, so all arms stay up; an idle SGLang polls its queue and keeps a core busy.
vllm=(--engine vllm --servers keep --engine-program "$folder/vllm/bin/vllm" --engine-arg=--max-model-len=8192)

replay() { # NAME, then arguments of kvbench replay
  local name=$1
  shift
  unshare -n bash -c 'ip link set lo up && exec "$@"' alone "$kvbench" replay "${common[@]}" "$@" \
    --out "$reports/$name.json" || { local code=$?; ((code == 3)) || return "$code"; }
}

mkdir -p "$reports"
for run in "${runs[@]}"; do
  case $run in
    vllm) replay vllm-native "${vllm[@]}" --arm off --arm l1@l1=120MiB --arm l1+l2@l1=120MiB+l2=512MiB \
      --arm "l1+l2+fs@l1=120MiB+l2=64MiB+l3=$tiers" ;;
    lmcache) replay vllm-lmcache "${vllm[@]}" --engine-env PYTHONPATH="$folder/lmcache_site" \
      --arm l1@l1=120MiB --arm "l1+lmcache@l1=120MiB+lmcache=1GiB,$tiers" ;;
    mooncake) replay vllm-mooncake "${vllm[@]}" --engine-env PYTHONPATH="$folder/mooncake_site" \
      --arm l1@l1=120MiB --arm l1+mooncake@l1=120MiB+mooncake=512MiB ;;
    sglang) replay sglang-hicache --engine sglang --engine-program "$folder/sglang/bin/python" \
      --engine-arg=--context-length=8192 --engine-arg=--mem-fraction-static=0.2 \
      --arm off --arm l1@l1=120MiB --arm l1+l2@l1=120MiB+l2=480MiB --arm "l1+l2+file@l1=120MiB+l2=160MiB+l3=$tiers" ;;
    *) echo "compare.sh: $run is none of vllm, lmcache, mooncake, sglang" >&2; exit 2 ;;
  esac
done
