#!/bin/sh
# The files of the image: the binaries, the libraries that they load, and nothing that could be run
# besides. No shell, no package manager. FOLDER must not exist.
#
#   deploy/image/rootfs.sh FOLDER target/release/lastgasp target/release/lastgasp-router
set -eu

if [ $# -lt 2 ]; then
  echo "usage: $0 FOLDER BINARY..." >&2
  exit 64
fi
root=$1
shift
mkdir "$root"
mkdir -p "$root/usr/bin" "$root/etc/ssl/certs" "$root/etc/lastgasp" "$root/run/lastgasp" "$root/proc" "$root/sys" \
  "$root/dev" "$root/tmp"

for binary in "$@"; do
  # Debug information is ten times the rest.
  strip -o "$root/usr/bin/$(basename "$binary")" "$binary"
  # Of `libc.so.6 => /lib/…/libc.so.6 (0x…)` and `/lib64/ld-linux-x86-64.so.2 (0x…)` the paths.
  ldd "$binary" | grep -o '/[^ ]*' | while read -r library; do
    install -D -m 755 "$(readlink -f "$library")" "$root$library"
  done
done

# Authorities, for NATS by TLS. Names of users, for what shows them.
if [ -r /etc/ssl/certs/ca-certificates.crt ]; then
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
fi
printf 'root:x:0:0:root:/:/\nnonroot:x:65532:65532:nonroot:/:/\n' > "$root/etc/passwd"
printf 'root:x:0:\nnonroot:x:65532:\n' > "$root/etc/group"
# glibc asks DNS by itself (2.34 and newer).
printf 'hosts: files dns\n' > "$root/etc/nsswitch.conf"
