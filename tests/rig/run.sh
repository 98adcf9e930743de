# Runs in the rig, whose root is the Debian tree: /srv is the checkout, /mnt a directory of the host's, and port 3 leads to the host.
# The rig's guests are run with the functions that the host runs the rig with. Variables: script, extent.
# shellcheck shell=bash
set -euo pipefail
cd /srv
here=/srv/tests tree='' from_tree=() initramfs=/mnt/initramfs kernel=/kernels/cloud/vmlinuz
source "$here/report.sh"
source "$here/qemu/machine.sh"
source "$here/qemu/drive.sh"
processor=(-accel kvm -cpu host -smp 2) memory=("${shared_memory[@]}") options=(-no-reboot) drive=()
qemu='' server='' scenario=$script
outcomes=/run/outcomes work=/run/work
mkdir -p $outcomes $work
trap 'kill -KILL $qemu $server 2>/dev/null || true' EXIT

# What is said goes to the host.
say() { echo "step $*" >&3; }
pass() { echo "pass $*" >&3; }
fail() { echo "fail $*" >&3; echo "$*" >>$outcomes/failed; }
figure() { echo "figure $*" >&3; }

source "$here/rig/host.sh"
source "$here/rig/machine/$script.sh"
check "$script: the IOMMU logs no fault" no_dma_fault
