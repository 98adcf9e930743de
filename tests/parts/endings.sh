# guests reboot, reset and unbind the drive under load; memory that comes, goes, or is not what it seems
# shellcheck shell=bash
source "$here/qemu/scenario.sh"
source "$here/qemu/endings.sh"

guests_ready || exit
for doorbells in mapped posted; do
  # The whole counts with --full.
  scenario resets.$doorbells resets $doorbells "$(share 50 6)" "$(share 50 2)" "$(share 200 2)"
  scenario reboots.$doorbells reboots $doorbells "$(share 20 2)"
  scenario pin_only.$doorbells pin_only $doorbells
  scenario dimm.$doorbells dimm $doorbells
  scenario no_descriptors.$doorbells no_descriptors $doorbells
  scenario private_memory.$doorbells private_memory $doorbells
done
