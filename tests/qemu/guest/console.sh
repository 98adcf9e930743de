#!/bin/busybox sh
# The first process of a guest whose only port is its console: a shell there. Powers off when that ends.
# shellcheck shell=dash
/bin/busybox mkdir -p /proc
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PS1='guest# '
setsid cttyhack sh
poweroff -f
