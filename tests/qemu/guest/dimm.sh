# Memory comes and goes while the drive is busy: fio's buffers lie in it, and it goes under that I/O.
# shellcheck shell=dash
. /guest/host.sh
await_drive
node=/sys/devices/system/node/node1
has_memory() { [ -e $node/meminfo ] && [ "$(awk '/MemTotal/ { print $4 }' $node/meminfo)" -gt 0 ]; }
has_none() { ! has_memory; }
# in_buffers NODE: pages of fio's buffers that lie in this node's memory.
in_buffers() { cat /proc/[0-9]*/numa_maps 2>/dev/null | grep '/new/buffers' | grep -o " N$1=[0-9]*" | awk -F= '{ sum += $2 } END { print sum + 0 }'; }

step "memory comes"
check "fio keeps the drive busy" load
pause plug
check "the new memory is there" eventually has_memory
check "fio saw no error while memory came" enough

step "fio's buffers lie in it"
mkdir /new
check "files that lie in the new memory" mount -t tmpfs -o mpol=bind:1 new /new
truncate -s 1M /new/buffers
check "fio's buffers are in one" load --iomem=mmapshared:/new/buffers
wanted=$(($(completed) + 4096))
progress() { [ "$(completed)" -ge "$wanted" ]; }
check "fio goes on" eventually progress
fact before.new "$(in_buffers 1)"
fact before.old "$(in_buffers 0)"

step "memory goes"
pause unplug
check "the new memory is gone" eventually has_none
wanted=$(($(completed) + 4096))
check "fio goes on in old memory" eventually progress
fact after.new "$(in_buffers 1)"
fact after.old "$(in_buffers 0)"
check "fio saw no error while the memory of its buffers went" enough
check "the kernel has no complaint" kernel_is_content
