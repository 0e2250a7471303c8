#!/usr/bin/env bash
# Records the demo as docs/demo.svg: what the README shows. Needs asciinema (Debian) and npm.
set -euo pipefail
cd "$(dirname "$0")/.."

cast=$(mktemp --suffix .cast)
trap 'rm -f "$cast"' EXIT
cargo build --quiet --release --bins -p lastgasp -p lastgasp-router -p lastgasp-tests
asciinema rec --overwrite --quiet --cols 100 --rows 32 --idle-time-limit 1 \
  --command "target/release/demo --tokens 120" "$cast"
npx --yes svg-term-cli@2.1.1 --in "$cast" --out docs/demo.svg --window --no-cursor --width 100 --height 32
