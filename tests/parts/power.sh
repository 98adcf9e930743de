# the power of a machine with server and client fails under writes: what was durable is there, after each of many cuts
# shellcheck shell=bash
source "$here/qemu/scenario.sh"
source "$here/qemu/power.sh"

need nbdkit:nbdkit strip:binutils xz:xz-utils || exit
guests_ready || exit
check "build the server and its client" cargo build --locked --release --quiet -p outboard-server -p outboard-vmm -p outboard-tests
machine_programs
scenario power.file survives_power_cuts /mnt/disk.img "$(share 10 2)"
scenario power.device survives_power_cuts /dev/vda "$(share 10 1)"
