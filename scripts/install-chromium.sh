#!/usr/bin/env bash
# Installs Debian's Chromium if it is missing; the tests that open the report in a real browser use it.
# Safe to run again: it does nothing if Chromium is already installed.
set -euo pipefail

if command -v chromium >/dev/null; then
    echo "chromium is already installed: $(chromium --version 2>/dev/null || echo 'version unknown')"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "apt-get was not found: install Chromium with this system's package manager." >&2
    exit 1
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "installing Chromium needs root: run this as root, or install sudo." >&2; exit 1; }
    as_root=(sudo)
fi

export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
chromium --version
