# The features of docs/nvme.md, with their selectors.
# shellcheck shell=dash disable=SC2154

# value FEATURE SELECT [ARGUMENT…]: its value.
value() {
  feature=$1 select=$2
  shift 2
  nvme get-feature "$controller" --feature-id="$feature" --sel="$select" "$@" >/tmp/answer 2>&1
  printf '0x%x' $((0x$(sed -n 's/.*value:\(0x\)\{0,1\}\([0-9a-f]*\)$/\2/p' /tmp/answer)))
}
set_feature() {
  feature=$1 new=$2
  shift 2
  nvme set-feature "$controller" --feature-id="$feature" --value="$new" "$@"
}

# changes FEATURE NAME DEFAULT NEW [ARGUMENT…]: of an unsaveable feature that can be changed, and is put back.
changes() {
  feature=$1 name=$2 default=$3 new=$4
  shift 4
  old=$(value "$feature" 0 "$@")
  holds "$name: default" "$(value "$feature" 1 "$@")" = "$default"
  holds "$name: saved" "$(value "$feature" 2 "$@")" = "$default"
  holds "$name: can be changed" $(($(value "$feature" 3 "$@") & 0x5)) -eq 4
  check "$name: set" set_feature "$feature" "$new" "$@"
  holds "$name: current" "$(value "$feature" 0 "$@")" = "$new"
  holds "$name: the default stays" "$(value "$feature" 1 "$@")" = "$default"
  refused "$name: cannot be saved" 10d set_feature "$feature" "$new" --save "$@"
  check "$name: set back" set_feature "$feature" "$old" "$@"
  holds "$name: is back" "$(value "$feature" 0 "$@")" = "$old"
}

# bytes FEATURE SELECT LENGTH [ARGUMENT…]: a feature's data, in hexadecimal.
bytes() {
  feature=$1 select=$2 length=$3
  shift 3
  nvme get-feature "$controller" --feature-id="$feature" --sel="$select" --data-len="$length" --raw-binary "$@" | xxd -p
}
# milliseconds: of the timestamp.
milliseconds() { echo $((0x$(bytes 0x0e 0 8 | sed 's/^\(..\)\(..\)\(..\)\(..\)\(..\)\(..\).*/\6\5\4\3\2\1/'))); }

features() {
  changes 0x01 "Arbitration" 0x7 0x1020303
  changes 0x02 "Power Management" 0x0 0x20
  refused "Power Management: there is one state" 2 set_feature 0x02 1
  changes 0x04 "Temperature Threshold, over" 0x157 0x150
  holds "Temperature Threshold, under" "$(value 0x04 0 --cdw11=0x100000)" = 0x0
  refused "Temperature Threshold: a sensor that does not exist" 2 set_feature 0x04 0x10150
  changes 0x05 "Error Recovery" 0x0 0x10 --namespace-id=1
  changes 0x06 "Volatile Write Cache" 0x1 0x0
  # Linux does not let anybody else set it.
  for select in 0 1 2; do holds "Number of Queues, selector $select" "$(value 0x07 $select)" = 0x3f003f; done
  changes 0x08 "Interrupt Coalescing" 0x0 0x204
  changes 0x0a "Write Atomicity" 0x0 0x1
  changes 0x0b "Asynchronous Event Configuration" 0x0 0x102

  # The vector is part of the value.
  holds "Interrupt Vector Configuration" "$(value 0x09 0 --cdw11=1)" = 0x1
  check "Interrupt Vector Configuration: set" set_feature 0x09 0x10001
  holds "Interrupt Vector Configuration: of that vector" "$(value 0x09 0 --cdw11=1)" = 0x10001
  holds "Interrupt Vector Configuration: of another" "$(value 0x09 0 --cdw11=2)" = 0x2
  refused "Interrupt Vector Configuration: a vector that does not exist" 2 set_feature 0x09 0xffff
  set_feature 0x09 0x1

  holds "LBA Range Type: of a namespace, not to be changed" "$(value 0x03 3)" = 0x2
  holds "LBA Range Type: one range" "$(value 0x03 0 --namespace-id=1)" = 0x0
  last=$(bytes 0x03 0 4096 --namespace-id=1 | tr -d '\n' | cut -c 49-64 | sed 's/\(..\)\(..\)\(..\)\(..\).*/\4\3\2\1/')
  holds "LBA Range Type: it is all of it" $((0x$last + 1)) -eq $((image_bytes / block_size))
  refused "LBA Range Type: set" 10e set_feature 0x03 0 --namespace-id=1 --data=/dev/zero --data-len=4096

  refused "Arbitration of a namespace" 10f set_feature 0x01 3 --namespace-id=1
  for feature in 0x0c 0x0d 0x0f 0x10 0x16 0x82 0xc0; do
    refused "feature $feature does not exist" 2 nvme get-feature "$controller" --feature-id=$feature
  done
}

# Linux has set it to its own time.
timestamp() {
  difference=$(($(milliseconds) / 1000 - $(date +%s)))
  holds "Timestamp: Linux's" "${difference#-}" -le 60
  holds "Timestamp: default" "$(bytes 0x0e 1 8)" = 0000000000000000
  check "Timestamp: set" set_feature 0x0e 1000000000000
  first=$(milliseconds)
  holds "Timestamp: what was set" $((first / 1000 - 1000000000)) -le 60 -a "$first" -ge 1000000000000
  holds "Timestamp: a host set it" "$(bytes 0x0e 0 8 | cut -c 13-16)" = 0200
  sleep 1
  holds "Timestamp: counts on" $(($(milliseconds) - first)) -ge 1000
}

host_identifier() {
  holds "Host Identifier: default" "$(bytes 0x81 1 16 --cdw11=1)" = 00000000000000000000000000000000
  printf 'the host in Qemu' >/tmp/host
  check "Host Identifier: set" nvme set-feature "$controller" --feature-id=0x81 --value=1 --data=/tmp/host --data-len=16
  holds "Host Identifier: 16 bytes" "$(bytes 0x81 0 16 --cdw11=1)" = "$(xxd -p /tmp/host)"
  printf 'the host' >/tmp/host
  check "Host Identifier: set, short" nvme set-feature "$controller" --feature-id=0x81 --value=0 --data=/tmp/host --data-len=8
  holds "Host Identifier: 8 bytes" "$(bytes 0x81 0 8 --cdw11=0)" = "$(xxd -p /tmp/host)"
}

features
timestamp
host_identifier
