# four drives in one process, a client each: what one client does to itself, the others do not notice
# shellcheck shell=bash
#
# Latency of the three others while the fourth is killed, stopped, or takes its memory away, by their latency in the
# window before: medians of the rounds. The clients are paced and leave the machine room.

check "build the release" cargo build --locked --release --quiet -p outboard-server -p outboard-tests
rounds=$(share 25 9)
say "$rounds rounds of each misdeed"
ratios=$outcomes/isolation
check "nothing is lost" bash -c "ROUNDS=$rounds cargo test --locked --release --quiet -p outboard-tests --test isolation -- \
  --ignored --nocapture slowdown | tee '$ratios'"
for misdeed in killed stopped truncated; do
  ratio() { awk -v misdeed="$misdeed" -v name="$1" '$1 == "ratio" && $2 == misdeed && $3 == name { print $4 }' "$ratios"; }
  figure "isolation.slowdown.$misdeed" "$(ratio p50)" ratio -le 1.3
  figure "isolation.slowdown_p99.$misdeed" "$(ratio p99)" ratio -le 2
  figure "isolation.throughput.$misdeed" "$(ratio ios)" ratio -ge 0.9
done
