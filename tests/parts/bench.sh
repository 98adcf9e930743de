# the data plane: our driver against our server, a core each, doorbells mapped
# shellcheck shell=bash
#
# SPDK's target under its own tool, on this kind of machine, 4 KiB random reads at depth 1, 32 and 128: 651,000,
# 1,235,000 and 1,263,000 IOPS with a malloc bdev, 1,104,000, 3,119,000 and 3,788,000 with a null bdev. These
# machines are shared: what one core copies from memory varies by half from minute to minute, and the drive with it.
# So every run gates on ratios of one round, each figure the median of the rounds, with room for a busy neighbour;
# --full, on a quiet machine, gates on SPDK's figures too.

spdk() {
  case $1 in
    ram.1) echo 651000 ;; ram.32) echo 1235000 ;; ram.128) echo 1263000 ;;
    null.1) echo 1104000 ;; null.32) echo 3119000 ;; null.128) echo 3788000 ;;
  esac
}

# measure NAMESPACE DEPTHS: IOPS and messages per I/O, a line a depth: "DEPTH IOPS MESSAGES".
measure() {
  local socket=$work/drive.sock server
  taskset -c 0 target/release/outboard-server nvme --socket-path "$socket" --namespace "$1" >"$work/server.log" 2>&1 &
  server=$!
  until [ -S "$socket" ]; do kill -0 $server 2>/dev/null || { cat "$work/server.log" >&2; return 1; }; sleep 0.1; done
  # Memory that was never written is one page of zeroes, which a cache holds.
  target/release/outboard-vmm bench --device "socket=$socket" --cpu 1 --block 128k --rw write --depth 16 --time 1s \
    >/dev/null 2>&1
  target/release/outboard-vmm bench --device "socket=$socket" --cpu 1 --depth "$2" --time 1s 2>/dev/null |
    awk '$1 == "randread" { print $3, $5, $NF }'
  kill -TERM $server
  wait $server
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
check "build the release" cargo build --locked --release --quiet -p outboard-server -p outboard-vmm -p outboard-tests
rounds=$(share 9 5)
say "$rounds rounds of drives on ram and null, each beside what core 0 copies at that moment"
for ((round = 1; round <= rounds; round++)); do
  copies=$(taskset -c 0 target/release/copy-rate 0.5)
  echo "$copies" >>"$work/copies"
  for kind in ram null; do
    measure "$kind:256M" 1,32,128 >"$work/round"
    while read -r depth iops messages; do
      echo "$iops" >>"$work/$kind.$depth"
      echo "$messages" >>"$work/messages"
      awk -v a="$iops" -v b="$copies" 'BEGIN { print a / b }' >>"$work/$kind.$depth.per-copy"
    done <"$work/round"
  done
done

figure bench.copies_per_second "$(median <"$work/copies")" copies/s
for kind in ram null; do
  for depth in 1 32 128; do
    iops=$(median <"$work/$kind.$depth")
    bar=()
    [ "$extent" = share ] || bar=(-gt "$(spdk "$kind.$depth")")
    figure "bench.$kind.depth$depth.iops" "$iops" IOPS "${bar[@]}"
    figure "bench.$kind.depth$depth.vs_spdk" "$(awk -v a="$iops" -v b="$(spdk "$kind.$depth")" 'BEGIN { print a / b }')" ratio
  done
done
# What is left of a core's copying when it also plays the drive.
figure bench.ram.depth32.per_copy "$(median <"$work/ram.32.per-copy")" ratio -ge 0.4
figure bench.ram.depth128.per_copy "$(median <"$work/ram.128.per-copy")" ratio -ge 0.4
figure bench.null.depth32.per_copy "$(median <"$work/null.32.per-copy")" ratio -ge 0.8
figure bench.null.depth128.per_copy "$(median <"$work/null.128.per-copy")" ratio -ge 1
figure bench.messages_per_io "$(sort -g "$work/messages" | tail -1)" messages -eq 0
