# nvme-cli's answers.
# shellcheck shell=dash

# field NAME: of nvme-cli's "name : value" lines in /tmp/answer.
field() { sed -n "s/^$1[[:space:]]*:[[:space:]]*//p" /tmp/answer | sed 's/[[:space:]]*$//' | head -n 1; }

# answers WHAT COMMAND…: leaves the command's answer in /tmp/answer.
answers() {
  what=$1
  shift
  if "$@" >/tmp/answer 2>&1; then
    pass "nvme $what answers"
  else
    fail "nvme $what answers (exit code $?)"
    sed 's/^/step | /' /tmp/answer >/dev/ttyS1
  fi
}

# holds WHAT TEST-EXPRESSION…
holds() {
  what=$1
  shift
  if test "$@"; then pass "$what"; else fail "$what: $*"; fi
}

# refused WHAT STATUS COMMAND…: the command fails with that NVMe status: status code type and status code, in hexadecimal.
refused() {
  what=$1
  wanted=$2
  shift 2
  if "$@" >/tmp/answer 2>&1; then
    fail "$what: it is done"
  else
    # Beside it stand More and Do Not Retry.
    status=$(sed -n 's/.*(\(0x[0-9a-f]*\))$/\1/p' /tmp/answer)
    holds "$what" "$(printf %x $((${status:-0} & 0x7ff)))" = "$wanted"
    [ -n "$status" ] || sed 's/^/step | /' /tmp/answer >/dev/ttyS1
  fi
}

# result: dword 0 of a passed-through command's completion, in /tmp/answer.
result() { sed -n 's/.*result: *//p' /tmp/answer; }
