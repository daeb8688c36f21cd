#!/usr/bin/env bash
# Collects what `kvbench topo --from` reads on this machine into one archive. Installs nothing, changes nothing.
#
#   bash topology.sh [ARCHIVE]        default: topology-HOST-DATE.tar.gz in the current folder
#
# Run it as root to include ACS settings, which only root may read. Tools that are missing are listed in missing.txt.
# Serial numbers, UUIDs and MAC addresses are not collected, except what lspci -vv prints of its own ("Device Serial
# Number" lines are dropped). NCCL_TOPO_FILE or NCCL_TOPO_DUMP_FILE, where set and there, is copied.
set -u

sys=${SYSFS_ROOT:-/sys}
proc=${PROC_ROOT:-/proc}
archive=${1:-topology-$(uname -n)-$(date +%Y%m%d).tar.gz}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
out=$work/topology
mkdir -p "$out/sys" "$out/proc" || exit 1

# run NAME COMMAND...: keeps the output of a command, or notes why there is none.
run() {
  local name=$1
  shift
  if ! command -v "$1" >/dev/null 2>&1; then
    echo "$1: not installed ($name)" >>"$out/missing.txt"
    return
  fi
  if timeout 30 "$@" >"$out/$name" 2>"$work/error" && [ -s "$out/$name" ]; then
    return
  fi
  echo "$*: $(head -n 1 "$work/error" | tr -d '\r') ($name)" >>"$out/missing.txt"
  [ -s "$out/$name" ] || rm -f "$out/$name"
}

# copy FILE...: copies files of /sys by reading them, because their sizes are not true and some refuse to be read.
copy() {
  local file target
  for file in "$@"; do
    [ -f "$file" ] || continue
    target=$out/sys/${file#"$sys"/}
    mkdir -p "$(dirname "$target")"
    cat "$file" >"$target" 2>/dev/null || rm -f "$target"
  done
}

# link FROM...: keeps a symbolic link as it is, and makes the folder it leads to.
link() {
  local from target
  for from in "$@"; do
    [ -L "$from" ] || continue
    target=$out/sys/${from#"$sys"/}
    mkdir -p "$(dirname "$target")"
    [ -L "$target" ] || cp -P "$from" "$target"
    target=$(readlink -f "$from")
    mkdir -p "$out/sys/${target#"$sys"/}"
  done
}

run nvidia-smi-topo-m.txt nvidia-smi topo -m
run nvidia-smi-topo-p2p.txt nvidia-smi topo -p2p r
run nvidia-smi-query.csv nvidia-smi --format=csv \
  --query-gpu=index,pci.bus_id,name,memory.total,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,utilization.gpu
run rocm-smi-showtopo.txt rocm-smi --showtopo
run lspci-t.txt lspci -t
run lspci-vv.raw lspci -Dvv -nn
if [ -f "$out/lspci-vv.raw" ]; then
  grep -v 'Serial Number' "$out/lspci-vv.raw" >"$out/lspci-vv.txt"
  rm -f "$out/lspci-vv.raw"
fi
run hwloc.xml lstopo-no-graphics --whole-io --of xml
for nccl in "${NCCL_TOPO_DUMP_FILE:-}" "${NCCL_TOPO_FILE:-}" /var/run/nvidia-topologyd/virtualTopology.xml; do
  [ -n "$nccl" ] && [ -s "$nccl" ] && cp "$nccl" "$out/nccl-topology.xml" && break
done
for net in "$sys"/class/net/*/device; do
  [ -e "$net" ] || continue
  net=$(basename "$(dirname "$net")")
  run "ethtool-$net.txt" ethtool "$net"
done

for device in "$sys"/bus/pci/devices/*; do
  link "$device" "$device/iommu_group"
  real=$(readlink -f "$device")
  copy "$real"/{class,vendor,device,numa_node,local_cpulist} \
    "$real"/{current,max}_link_{speed,width}
  link "$real/physfn"
  case $(cat "$real/class" 2>/dev/null) in 0x0604*) copy "$real/config" ;; esac
done
for node in "$sys"/devices/system/node/node[0-9]*; do
  copy "$node"/{cpulist,distance,meminfo} "$node"/access0/initiators/{read,write}_bandwidth
done
for cpu in "$sys"/devices/system/cpu/cpu[0-9]*; do
  copy "$cpu/topology/physical_package_id"
done
for group in "$sys"/kernel/iommu_groups/*; do copy "$group/type"; done
[ -d "$sys/kernel/iommu_groups" ] && mkdir -p "$out/sys/kernel/iommu_groups"
for entry in "$sys"/class/net/* "$sys"/class/infiniband/* "$sys"/class/nvme/* "$sys"/block/*; do
  [ -e "$entry" ] || continue
  link "$entry"
  real=$(readlink -f "$entry")
  link "$real/device"
  copy "$real"/{speed,operstate,address,model,size} "$real/queue/rotational" "$real/device/model" "$real"/ports/*/{rate,state}
  case $entry in */class/net/*) rm -f "$out/sys/${real#"$sys"/}/address" ;; esac
done
grep -m 1 '^model name' "$proc/cpuinfo" >"$out/proc/cpuinfo" 2>/dev/null || rm -f "$out/proc/cpuinfo"
[ -f "$out/missing.txt" ] && sort -o "$out/missing.txt" "$out/missing.txt"

if tar -C "$work" -czf "$archive" topology; then
  echo "$archive"
  [ -f "$out/missing.txt" ] && echo "not collected:" >&2 && sed 's/^/  /' "$out/missing.txt" >&2
  exit 0
fi
exit 1
