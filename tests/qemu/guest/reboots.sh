# One boot of many: it finds what those before it wrote, adds to that, and ends with the drive busy: by Linux's
# reboot, which shuts the drive down, and every second time by a reset that nobody tells the drive of.
# Variables: reboots (how many boots follow the first).
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive
check "mount" mount -t ext4 "$drive" /mnt
boot=$(find /mnt -name 'boot-*' | wc -l)
fact boot "$boot"
[ "$boot" -eq 0 ] || check "the files of $boot boots" sha256sum -cs /mnt/sums
head -c 1048576 /dev/urandom >"/mnt/boot-$boot"
sha256sum "/mnt/boot-$boot" >>/mnt/sums
check "fsync" /usr/bin/sync "/mnt/boot-$boot" /mnt/sums
check "fio verifies all that it wrote" fio --name=verify --directory=/mnt --size=2M --rw=randrw --bs=4k --iodepth=32 \
  --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1
check "the kernel has no complaint" kernel_is_content

if [ "$boot" -lt "$reboots" ]; then
  fio --name=load --directory=/mnt --size=16M --rw=randrw --bs=4k --iodepth=32 --ioengine=libaio --direct=1 --time_based \
    --runtime=600 >/tmp/fio 2>&1 &
  check "fio keeps the drive busy" eventually in_flight 8
  if [ $((boot % 2)) -eq 0 ]; then reboot -f; else echo b >/proc/sysrq-trigger; fi
  sleep 600
fi
check "umount" umount /mnt
