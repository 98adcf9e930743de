# Runs in the rig, whose root is the Debian tree: /srv is the checkout, /mnt a directory of the host's, and port 3 leads to the host.
# The rig's guests are run with the functions that the host runs the rig with. Variables: script, extent.
# shellcheck shell=bash
set -euo pipefail
cd /srv
here=/srv/tests tree='' from_tree=() initramfs=/run/initramfs kernel=/kernels/cloud/vmlinuz
source "$here/report.sh"
source "$here/qemu/machine.sh"
source "$here/qemu/drive.sh"
qemu='' server='' scenario=$script outcomes=/run/outcomes
mkdir -p $outcomes
cp /mnt/initramfs $initramfs # there, each start of a guest would fetch it anew

# What is said goes to the host.
say() { echo "step $*" >&3; }
pass() { echo "pass $*" >&3; }
fail() { echo "fail $*" >&3; echo "$*" >>$outcomes/failed; }
figure() { echo "figure $*" >&3; }

source "$here/rig/host.sh"
new_guest "$script"
trap 'kill -KILL $qemu $server 2>/dev/null || true; keep_logs' EXIT
source "$here/rig/machine/$script.sh"
check "$script: the IOMMU logs no fault" no_dma_fault
