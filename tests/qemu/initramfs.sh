# The guest's initramfs: busybox and the programs of the tests, cached; this checkout's scripts, appended to it.
# shellcheck shell=bash

guest_programs=(/usr/bin/fio /usr/sbin/nvme /usr/sbin/mkfs.ext4 /usr/sbin/e2fsck /usr/sbin/fstrim /usr/sbin/blockdev /usr/bin/sync
  /usr/bin/gpiodetect /usr/bin/gpioinfo /usr/bin/gpioget /usr/bin/gpioset /usr/bin/gpiomon)
# Of Debian's stable kernel that has all drivers.
guest_modules=(gpio-regmap gpio-idio-16 gpio-pci-idio-16)

# guest_initramfs FILE
guest_initramfs() {
  local programs directory
  need cpio:cpio xz:xz-utils || return
  programs=$tree/guest-$(sha256sum "$here/qemu/initramfs.sh" | cut -c 1-12).cpio.gz
  if [ ! -e "$programs" ]; then
    say "packing the guest's programs"
    pack_programs "$1.programs" && mv "$1.programs" "$programs" || return
  fi
  directory=$(mktemp -d)
  mkdir "$directory/guest"
  cp "$here/qemu/guest/init" "$directory/"
  cp "$here"/qemu/guest/*.sh "$directory/guest/"
  pack "$directory" "$1.scripts" && cat "$programs" "$1.scripts" >"$1" # Linux unpacks archives one after the other
}

pack_programs() {
  local directory file
  directory=$(mktemp -d)
  mkdir -p "$directory"/{bin,modules}
  cp "$tree/bin/busybox" "$directory/bin/"
  for file in "${guest_programs[@]}" $(chroot "$tree" ldd "${guest_programs[@]}" | grep -o '/[^ ]*[^ :]' | sort -u); do
    mkdir -p "$directory$(dirname "$file")"
    cp -L "$tree$file" "$directory$file"
  done
  for file in "${guest_modules[@]}"; do
    xz -dc "$tree"/kernels/stable/modules/kernel/drivers/*/"$file.ko.xz" >"$directory/modules/$file.ko"
  done
  pack "$directory" "$1"
}

# pack DIRECTORY FILE: and removes the directory.
pack() {
  (cd "$1" && find . | cpio --quiet -o -H newc | gzip -1) >"$2"
  rm -rf "$1"
}
