# A drive that stopped before the first command: Linux finds it dead.
# shellcheck shell=dash
. /guest/host.sh
no_drive() { [ ! -e "$drive" ]; }
# CSTS.CFS is bit 1.
found_dead() { dmesg | grep -E 'controller is down; will reset: CSTS=0x[0-9a-f]*[2367abef],'; }
check "Linux finds the controller in a fatal state" eventually found_dead
check "there is no drive" no_drive
