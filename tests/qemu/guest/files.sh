# The first boot of a drive: what it says of itself, a file system, files, fio with verification, fstrim.
# Variables: those of identify.sh; file_mib, fio_mib, idle_seconds (0 for none).
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive
step "nvme-cli"
. /guest/identify.sh

step "mkfs.ext4 and mount"
check "mkfs.ext4" /usr/sbin/mkfs.ext4 -q "$drive"
check "mount" mount -t ext4 "$drive" /mnt

step "files with known checksums"
mkdir /mnt/files
for number in 1 2 3 4; do
  head -c $((number * 1048576 + number)) /dev/urandom >/tmp/file
  fact "sha256.$number" "$(sha256sum /tmp/file | cut -d ' ' -f 1)"
  cp /tmp/file "/mnt/files/$number"
done
rm /tmp/file
/usr/bin/sync

pause before-fio
step "fio: 4 KiB random reads and writes, depth 32, 2 jobs, crc32c"
check "fio verifies all that it wrote" fio --name=verify --directory=/mnt --size="${fio_mib}M" --numjobs=2 \
  --rw=randrw --bs=4k --iodepth=32 --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --group_reporting
cp /tmp/output /tmp/fio
check "fio saw no error" grep -q 'err= 0' /tmp/fio
pause after-fio

if [ "$idle_seconds" -gt 0 ]; then
  /usr/bin/sync
  sleep 6 # past the journal's last commit
  pause before-idle
  sleep "$idle_seconds"
  pause after-idle
fi

step "fstrim"
head -c $((file_mib * 1048576)) /dev/urandom >/mnt/big
/usr/bin/sync
pause big-file-written
rm /mnt/big /mnt/verify.*
/usr/bin/sync
check "fstrim" /usr/sbin/fstrim -v /mnt
pause trimmed

check "umount" umount /mnt
check "the kernel has no complaint" kernel_is_content
