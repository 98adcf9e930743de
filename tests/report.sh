# What a run says: progress with the time, each check's outcome, figures with their bars. Kept in files, so that it
# survives the subshells that the checks run in.
# shellcheck shell=bash

say() { printf '[%(%H:%M:%S)T +%4ds] %s\n' -1 "$SECONDS" "$*"; }

pass() { echo "$*" >>"$outcomes/passed"; say "  ok    $*"; }
fail() { echo "$*" >>"$outcomes/failed"; say "  FAIL  $*"; }

# check WHAT COMMAND…: runs it and counts how it ended.
check() {
  local what=$1
  shift
  say "$what"
  if "$@" </dev/null; then pass "$what"; else fail "$what (exit code $?: $*)"; fi
}

# figure NAME VALUE UNIT [OP BAR]: a figure, printed at the part's end; missing its bar (-eq, -le, -lt, -ge, -gt) fails the part.
figure() {
  local name=$1 value=$2 unit=$3 comparison=${4:-} bar=${5:-}
  echo "figure $name $value $unit" >>"$outcomes/figures"
  [ -n "$comparison" ] || return 0
  if compare "$value" "$comparison" "$bar"; then
    pass "$name is $value $unit (bar: $comparison $bar)"
  else
    fail "$name is $value $unit (bar: $comparison $bar)"
  fi
}

# compare A OP B: of decimal numbers; false when either is not one.
compare() {
  awk -v a="$1" -v op="$2" -v b="$3" 'BEGIN {
    number = "^-?[0-9]+([.][0-9]+)?(e[-+]?[0-9]+)?$"
    if (a !~ number || b !~ number) exit 1
    a += 0; b += 0
    exit !(op == "-eq" ? a == b : op == "-lt" ? a < b : op == "-le" ? a <= b : op == "-gt" ? a > b : op == "-ge" ? a >= b : 0)
  }'
}

# share FULL CI: how often something is repeated in this run.
share() { if [ "$extent" = full ]; then echo "$1"; else echo "$2"; fi; }

count() { if [ -e "$outcomes/$1" ]; then wc -l <"$outcomes/$1"; else echo 0; fi; }

# The middle one of the numbers that come in, a line each.
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { print a / b }'; }
