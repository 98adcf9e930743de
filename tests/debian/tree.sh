# What is made of Debian's packages once and cached. The tree: where QEMU 11.1, the guest's kernel and its programs come from,
# on whatever Debian the tests run. The disk: a whole Debian, installed.
# shellcheck shell=bash

cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/outboard

# Sets `tree` and `from_tree`, what a program of it is run with.
debian_tree() {
  tree=$(cached tree debian recipe) || return
  from_tree=("$tree/lib64/ld-linux-x86-64.so.2" --library-path "$tree/usr/lib/x86_64-linux-gnu")
}

# Sets `disk`, a directory: disk.img and OVMF.
debian_disk() {
  need sfdisk:fdisk partx:util-linux mkfs.ext4:e2fsprogs mkfs.vfat:dosfstools mcopy:mtools || return
  disk=$(cached disk disk disk)
}

# cached WHAT NAME RECIPE: prints the directory that the recipe makes. It is made first when there is none of this recipe:
# under another name, so that only a whole one is found.
cached() {
  local what=$1 recipe=$here/debian/$3 made partial=$cache/$2.partial log=$cache/$2.log mirror lock
  made=$cache/$2-$(sha256sum "$recipe" | cut -c 1-12)
  mkdir -p "$cache"
  exec {lock}>"$cache/lock"
  flock -n "$lock" || { say "another run is making it: waiting for the Debian $what" >&2; flock "$lock"; }
  if [ ! -d "$made" ]; then
    need debootstrap:debootstrap >&2 || return
    rm -rf --one-file-system "$partial"
    mirror=$(debian_mirror) || return
    say "making the Debian $what (some minutes, once; log in $log)" >&2
    if ! unshare --mount --propagation private bash "$recipe" "$partial" "$mirror" >"$log" 2>&1 </dev/null; then
      tail -n 20 "$log" >&2
      fail "the Debian $what could not be made: see $log" >&2
      return 1
    fi
    mv "$partial" "$made"
  fi
  exec {lock}>&-
  echo "$made"
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
