# A whole Debian on our drive: from the firmware to a login, a package, and what the image has of it.
# shellcheck shell=bash

# Where the root file system begins in the image, and how e2fsprogs are told so.
root_offset=$((34 << 20))

# runs_debian FIRMWARE DOORBELLS [again]: with `again`, it reboots after apt.
runs_debian() {
  local firmware=$1 doorbells=$2 again=${3:-} image=$work/disk.img started=$SECONDS
  cp --sparse=always "$disk/disk.img" "$image"
  drive_start "$image" 512 "$doorbells"
  system_start "$firmware"
  expect 'login: ' 900
  figure "$scenario.login" "$((SECONDS - started))" s
  log_in
  system_check "the firmware is $firmware" "$([ "$firmware" = ovmf ] || echo '!') test -d /sys/firmware/efi"
  system_check "the root file system is on our drive" \
    "findmnt -no SOURCE / | grep -x /dev/nvme0n1p3 && grep '$serial' /sys/block/nvme0n1/device/serial"
  system_check "the package is not there yet" '! dpkg -s hello'
  system_check "apt installs a package from a file" 'apt-get install -y /root/hello.deb' 300
  package_works
  if [ -n "$again" ]; then
    answer reboot
    expect 'login: ' 900
    log_in
    package_works
  fi
  system_check "no unit failed" '! systemctl --failed --no-legend | grep .'
  system_check "the kernel has no complaint" "! dmesg | grep -E 'I/O error|I/O Error|timeout, |EXT4-fs error|EXT4-fs warning|controller is down|Call Trace'"
  system_end
  drive_stop
  check "$scenario: e2fsck finds the image clean" "${from_tree[@]}" "$tree/usr/sbin/e2fsck" -fn "$image?offset=$root_offset"
  check "$scenario: the image has the package's program" test -n "$(program)"
}

package_works() {
  system_check "the package is installed" "dpkg -s hello | grep '^Status: install ok installed'"
  system_check "its program runs" "hello | grep 'Hello, world!'"
}

program() { "${from_tree[@]}" "$tree/usr/sbin/debugfs" -R 'cat /usr/bin/hello' "$image?offset=$root_offset" 2>/dev/null | head -c 4 | tr -d '\0'; }
