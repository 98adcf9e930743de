# guests of Debian's cloud kernel in unmodified QEMU 11.1 keep their files on our drive
# shellcheck shell=bash
source "$here/qemu/scenario.sh"
source "$here/qemu/files.sh"
source "$here/qemu/commands.sh"
source "$here/qemu/kills.sh"
source "$here/qemu/told.sh"

guests_ready || exit
scenario told.qemu takes_what_is_printed
for doorbells in mapped posted; do
  for block_size in 512 4096; do
    scenario "files.$doorbells.$block_size" keeps_files $doorbells $block_size
  done
done

# QEMU lays its own MSI-X table over the one that is mapped.
scenario files.whole-bar.4096 keeps_files whole-bar 4096

# Formatted to the other block size.
scenario commands.mapped obeys_commands mapped 512 1 4096
scenario commands.posted obeys_commands posted 4096 0 512

# The server killed under fsync'ed writes, QEMU killed under load: the whole counts with --full.
scenario kill_server.posted keeps_what_was_synced posted "$(share 5 2)"
scenario kill_server.mapped keeps_what_was_synced mapped "$(share 5 1)"
scenario kill_qemu.mapped serves_the_next mapped "$(share 20 4)"
scenario kill_qemu.posted serves_the_next posted "$(share 20 1)"
