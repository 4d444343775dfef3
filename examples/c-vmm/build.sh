#!/bin/sh
# Builds c-vmm: `build.sh OUTPUT`, with an installed Sterna (pkg-config) or with STERNA_CFLAGS and STERNA_LIBS.
set -eu
cflags=${STERNA_CFLAGS-$(pkg-config --cflags sterna)}
libs=${STERNA_LIBS-$(pkg-config --libs sterna)}
# The flags are several words each.
# shellcheck disable=SC2086
exec "${CC:-cc}" -std=gnu11 -O2 -Wall -Wextra -Werror $cflags "$(dirname "$0")/vmm.c" $libs -pthread -o "$1"
