#!/bin/sh
# Installs libsterna.so with versioned symbols, libsterna.a, sterna.h and sterna.pc.
#
#   install.sh [--prefix DIR] [--libdir DIR] [--destdir DIR] [--archive FILE]
#
# --prefix   default /usr/local
# --libdir   default PREFIX/lib
# --destdir  a root for packages: files go to DESTDIR/PREFIX, and sterna.pc names PREFIX
# --archive  an existing libsterna_capi.a; without it cargo builds one with the profile `release`
#
# CC names the C compiler, which also links.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=/usr/local libdir='' destdir='' archive=''
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || { echo "install.sh: $1 needs a value" >&2; exit 2; }
    case $1 in
    --prefix) prefix=$2 ;;
    --libdir) libdir=$2 ;;
    --destdir) destdir=$2 ;;
    --archive) archive=$2 ;;
    *) echo "install.sh: there is no option $1" >&2; exit 2 ;;
    esac
    shift 2
done
libdir=${libdir:-$prefix/lib}

if [ -z "$archive" ]; then
    (cd "$here" && cargo build --release --locked --lib)
    archive=${CARGO_TARGET_DIR:-$here/../../target}/release/libsterna_capi.a
fi
version=$(sed -n 's/^#define STERNA_VERSION "\(.*\)"$/\1/p' "$here/sterna.h")
# Before 1.0 each minor version may change the interface, so it is part of the soname.
soname=libsterna.so.${version%.*}
# What Rust's library needs of the system.
system='-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc'

install -d "$destdir$libdir/pkgconfig" "$destdir$prefix/include"
# shellcheck disable=SC2086
"${CC:-cc}" -shared -o "$destdir$libdir/libsterna.so.$version" -Wl,-soname,"$soname" \
    -Wl,--version-script="$here/sterna.map" -Wl,--whole-archive "$archive" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,--as-needed -Wl,-z,relro,-z,now,-z,defs -Wl,--strip-debug $system
ln -sf "libsterna.so.$version" "$destdir$libdir/$soname"
ln -sf "libsterna.so.$version" "$destdir$libdir/libsterna.so"
install -m 644 "$archive" "$destdir$libdir/libsterna.a"
install -m 644 "$here/sterna.h" "$destdir$prefix/include/sterna.h"
sed -e "s|@PREFIX@|$prefix|" -e "s|@LIBDIR@|$libdir|" -e "s|@VERSION@|$version|" -e "s|@PRIVATE@|$system|" \
    "$here/sterna.pc.in" > "$destdir$libdir/pkgconfig/sterna.pc"
