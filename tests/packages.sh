# What the tests need from Debian's packages, installed when it is missing.
# shellcheck shell=bash

# need COMMAND:PACKAGE…: false, with a loud line for each, when a command cannot be had.
need() {
  local entry missing=() packages=() lacking=''
  for entry in "$@"; do
    command -v "${entry%%:*}" >/dev/null || { missing+=("${entry%%:*}"); packages+=("${entry#*:}"); }
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  say "installing ${packages[*]}"
  if [ ! -e "$outcomes/apt-updated" ]; then
    apt-get update >"$outcomes/apt.log" 2>&1 || cat "$outcomes/apt.log"
    touch "$outcomes/apt-updated"
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}" >"$outcomes/apt.log" 2>&1 </dev/null ||
    tail -n 20 "$outcomes/apt.log"
  for entry in "${missing[@]}"; do
    command -v "$entry" >/dev/null || { fail "MISSING: the command $entry, and apt could not install it"; lacking=1; }
  done
  [ -z "$lacking" ]
}
