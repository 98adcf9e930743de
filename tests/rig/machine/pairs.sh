# The bug report's fio line in guests that differ in how they came by their drive: passed through by QEMU itself, by our
# server, and by our server without anything mapped. All are kept running; the runs of a pair follow each other.
# shellcheck shell=bash

# The interval that holds the median of what the numbers in FILE are a sample of, with a probability of 95% or more (for
# six numbers and more): the k-th from either end, by the binomial distribution.
interval() {
  sort -g "$1" | awk '{ v[NR] = $1 } END {
    tail = term = 0.5 ^ NR
    k = 1
    while (tail + (term *= (NR - k + 1) / k) <= 0.025) { tail += term; k++ }
    print v[k] " to " v[NR + 1 - k]
  }'
}

# run_fio GUEST JOBS: leaves `iops`, `ios`, and of a server `messages`.
run_fio() {
  local -A before=() after=()
  take_up "$1"
  [ -z "$server" ] || counters before
  guest_go "$2"
  guest_until ready 60
  [ -z "$server" ] || counters after
  iops=${facts[iops]} ios=${facts[ios]}
  messages=$((${after[messages.total]:-0} - ${before[messages.total]:-0}))
}

# compare_ways A B ROUNDS: the rates of A in relation to those of B, in turn one first and the other. Leaves the ratios
# in files, and of each way the sum of messages and of I/Os.
declare -A rates=() all_messages=() all_ios=()
compare_ways() {
  local round jobs way order
  for ((round = 0; round < $3; round++)); do
    for jobs in 1 4; do
      if [ $((round % 2)) -eq 0 ]; then order=("$2" "$1"); else order=("$1" "$2"); fi
      for way in "${order[@]}"; do
        run_fio "$way" $jobs
        rates[$way]=$iops
        all_messages[$way.$jobs]=$((${all_messages[$way.$jobs]:-0} + messages))
        all_ios[$way.$jobs]=$((${all_ios[$way.$jobs]:-0} + ios))
      done
      say "    $jobs jobs: $1 ${rates[$1]}, $2 ${rates[$2]} IOPS"
      ratio "${rates[$1]}" "${rates[$2]}" >>"/run/work/$1.$jobs"
    done
  done
}

mapfile -t addresses < <(nvme_drives)
pairs=$(share 15 7) trapped_pairs=$(share 7 2)
ways=(in_process served trapped)
for way in 0 1 2; do
  check "the drive of the ${ways[way]} guest is handed to vfio-pci" hand_over "${addresses[way]}" vfio-pci
  new_guest "${ways[way]}"
  "${ways[way]}" "${addresses[way]}"
  guest_start rates seconds="$(share 10 3)"
  put_aside "${ways[way]}"
done
for way in "${ways[@]}"; do
  take_up "$way"
  guest_until ready 180
done

say "$pairs pairs of a guest with the drive in QEMU and one with ours"
compare_ways served in_process "$pairs"
say "$trapped_pairs pairs of guests of our server with everything trapped and mapped"
compare_ways trapped served "$trapped_pairs"

for jobs in 1 4; do
  bar=()
  [ "$extent" = share ] || bar=(-ge 0.95)
  say "    $jobs jobs, $pairs pairs: the median of served/in-process lies in $(interval "/run/work/served.$jobs")"
  figure "rig.served_ratio.jobs$jobs" "$(median <"/run/work/served.$jobs")" ratio "${bar[@]}"
  figure "rig.served_messages.jobs$jobs" "${all_messages[served.$jobs]}" messages -eq 0
  figure "rig.trapped_ratio.jobs$jobs" "$(median <"/run/work/trapped.$jobs")" ratio
  figure "rig.trapped_messages_per_io.jobs$jobs" "$(ratio "${all_messages[trapped.$jobs]}" "${all_ios[trapped.$jobs]}")" messages -gt 0.1
done

for way in "${ways[@]}"; do
  take_up "$way"
  guest_go end
  guest_until end 60
  [ -z "$server" ] || drive_stop
done
