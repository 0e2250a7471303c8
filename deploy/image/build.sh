#!/bin/sh
# Builds the image without Docker and without any base image, by buildah, from binaries that are there.
# The machine's architecture is the image's; deploy/image/Dockerfile builds for several.
#
#   cargo build --release && deploy/image/build.sh lastgasp:0.1.0
#
# Environment: PROFILE  folder below target/ with the binaries, release unless set
#              BUILDAH  buildah with options before its command, as "buildah --storage-driver vfs"
set -eu

if [ $# -ne 1 ]; then
  echo "usage: $0 NAME[:TAG]" >&2
  exit 64
fi
here=$(dirname "$0")
binaries=$here/../../target/${PROFILE:-release}
buildah=${BUILDAH:-buildah}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$here/rootfs.sh" "$work/root" "$binaries/lastgasp" "$binaries/lastgasp-router"
container=$($buildah from scratch)
$buildah copy --quiet "$container" "$work/root" / > /dev/null
$buildah config --entrypoint '["/usr/bin/lastgasp"]' --cmd run --workingdir / \
  --label org.opencontainers.image.title=lastgasp \
  --label org.opencontainers.image.licenses=Apache-2.0 "$container"
$buildah commit --quiet --rm "$container" "$1"
