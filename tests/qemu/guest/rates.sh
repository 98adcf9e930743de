# The bug report's fio line, for `seconds`, with so many jobs as the host says, until it says "end".
# shellcheck shell=dash disable=SC2154
. /guest/host.sh
await_drive

# rate JOBS
rate() {
  fio --direct=1 --rw=randrw --rwmixread=100 --refill_buffers --norandommap --randrepeat=0 --ioengine=libaio --bs=4k \
    --iodepth=16 --runtime="$seconds" --time_based --name=job1 --filename="$drive" --numjobs="$1" --group_reporting \
    --output-format=terse --terse-version=3 >/tmp/fio
}

while pause ready && [ "$answer" != end ]; do
  rate "$answer" || fail "fio ends with exit code $?"
  fact iops "$(cut -d ';' -f 8 /tmp/fio)"
  fact ios $(($(cut -d ';' -f 6 /tmp/fio) / 4)) # KiB, of 4 each
  [ "$(cut -d ';' -f 5 /tmp/fio)" = 0 ] || fail "fio saw an error: $(cat /tmp/fio)"
done
check "the kernel has no complaint" kernel_is_content
