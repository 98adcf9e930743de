# The bug report's fio line, for `seconds`, each time that the host says so, `turns` times with one job and with four.
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive

# rate JOBS
rate() {
  fio --direct=1 --rw=randrw --rwmixread=100 --refill_buffers --norandommap --randrepeat=0 --ioengine=libaio --bs=4k \
    --iodepth=16 --runtime="$seconds" --time_based --name=job1 --filename="$drive" --numjobs="$1" --group_reporting \
    --output-format=terse --terse-version=3 >/tmp/fio
}

turn=0
while [ $turn -lt "$turns" ]; do
  for jobs in 1 4; do
    pause ready
    rate $jobs || fail "fio ends with exit code $?"
    fact iops.$jobs "$(cut -d ';' -f 8 /tmp/fio)"
    [ "$(cut -d ';' -f 5 /tmp/fio)" = 0 ] || fail "fio saw an error: $(cat /tmp/fio)"
  done
  turn=$((turn + 1))
done
check "the kernel has no complaint" kernel_is_content
