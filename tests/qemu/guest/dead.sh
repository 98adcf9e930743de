# A drive that stopped before the first command: Linux gives it up.
# shellcheck shell=dash
. /guest/host.sh
given_up() { dmesg | grep -E 'probe with driver nvme failed'; }
check "Linux gave the drive up" eventually given_up
check "there is no drive" test ! -e "$drive"
