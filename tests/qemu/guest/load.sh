# A file system that an earlier boot was cut off from comes back, and is kept busy until the host ends this one.
# Variables: first (1: there is no file system yet).
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive
# 1: errors were corrected, which is what a journal is for.
recover() { /usr/sbin/e2fsck -fp "$drive" || [ $? -eq 1 ]; }

[ "$first" -eq 0 ] || check "mkfs.ext4" /usr/sbin/mkfs.ext4 -q "$drive"
[ "$first" -eq 1 ] || check "e2fsck recovers the file system" recover
check "mount" mount -t ext4 "$drive" /mnt
[ "$first" -eq 1 ] || check "the file of the first boot" sha256sum -cs /mnt/sums
if [ "$first" -eq 1 ]; then
  head -c 4194304 /dev/urandom >/mnt/kept
  sha256sum /mnt/kept >/mnt/sums
  /usr/bin/sync
fi
check "the kernel has no complaint" kernel_is_content
fio --name=load --directory=/mnt --size=32M --numjobs=2 --rw=randrw --bs=4k --iodepth=32 --ioengine=libaio --direct=1 \
  --time_based --runtime=600 >/tmp/fio 2>&1 &
sleep 3
kill -0 $! && pass "fio keeps the drive busy"
pause busy
