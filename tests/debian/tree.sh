# The cached Debian tree: where QEMU 11.1, the guest's kernel and its programs come from, on whatever Debian the tests run.
# shellcheck shell=bash

cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/outboard
recipe=$here/debian/recipe

# Sets `tree` and makes it first when there is none of this recipe: under another name, so that only a whole one is found.
debian_tree() {
  local partial log mirror
  tree=$cache/debian-$(sha256sum "$recipe" | cut -c 1-12)
  mkdir -p "$cache"
  exec {tree_lock}>"$cache/lock"
  flock -n "$tree_lock" || { say "another run is making the Debian tree: waiting for it"; flock "$tree_lock"; }
  if [ ! -d "$tree" ]; then
    need debootstrap:debootstrap || return
    partial=$cache/debian.partial log=$cache/debian.log
    rm -rf --one-file-system "$partial"
    mirror=$(debian_mirror) || return
    say "making the Debian tree (about two minutes, once; log in $log)"
    if ! unshare --mount --propagation private bash "$recipe" "$partial" "$mirror" >"$log" 2>&1 </dev/null; then
      tail -n 20 "$log"
      fail "the Debian tree could not be made: see $log"
      return 1
    fi
    mv "$partial" "$tree"
  fi
  exec {tree_lock}>&-
  from_tree=("$tree/lib64/ld-linux-x86-64.so.2" --library-path "$tree/usr/lib/x86_64-linux-gnu")
}

# The first of the machine's own mirrors that has trixie's backports. Apt reads its sources itself, whatever form they have.
debian_mirror() {
  local uri
  while read -r uri; do
    if fetch "${uri%/}/dists/trixie-backports/InRelease" >/dev/null; then
      echo "$uri"
      return
    fi
  done < <(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sort -u | while read -r uri; do expand_mirror "$uri"; done)
  fail "no mirror of this machine's apt sources has Debian trixie-backports" >&2
  return 1
}

# One URI, or those of the list that a mirror method names.
expand_mirror() {
  case $1 in
    mirror+file:*) grep -o '^[^#[:space:]]*' "${1#mirror+file:}" ;;
    mirror://*) fetch "http${1#mirror}" | grep -o '^[^#[:space:]]*' ;;
    mirror+http*) fetch "${1#mirror+}" | grep -o '^[^#[:space:]]*' ;;
    *) echo "$1" ;;
  esac
}

# Prints what a URI holds, by apt's own methods, proxies and certificates.
fetch() {
  local file
  file=$(mktemp -u)
  /usr/lib/apt/apt-helper download-file "$1" "$file" >/dev/null 2>&1 || { rm -f "$file"; return 1; }
  cat "$file"
  rm -f "$file"
}
