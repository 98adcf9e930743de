# a whole Debian boots from our drive through OVMF and SeaBIOS up to a login, and apt installs a package
# shellcheck shell=bash
source "$here/qemu/scenario.sh"
source "$here/debian/console.sh"
source "$here/debian/system.sh"

guests_ready || exit
debian_disk
scenario debian.seabios.mapped runs_debian seabios mapped
scenario debian.ovmf.posted runs_debian ovmf posted again
[ "$extent" = share ] || {
  scenario debian.seabios.posted runs_debian seabios posted again
  scenario debian.ovmf.mapped runs_debian ovmf mapped again
}
