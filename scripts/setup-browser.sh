#!/usr/bin/env bash
# Makes sure that the browser tests find Chromium and its driver. Never fails: without them those tests are skipped.
set -uo pipefail

found() { command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; }

if found; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "Installing chromium and chromium-driver for the browser tests"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  if apt-get update -qq >"$log" 2>&1 && apt-get install -qq -y --no-install-recommends chromium chromium-driver >>"$log" 2>&1; then
    rm -f "$log"
    found && exit 0
  else
    tail -n 5 "$log" >&2
    rm -f "$log"
  fi
fi
cat >&2 <<'TEXT'
Chromium and its driver were not found: the browser tests will be skipped. To run them, install both:
  Debian:  sudo apt-get install chromium chromium-driver
  others:  put `chromium` and `chromedriver` of the same version on PATH
TEXT
