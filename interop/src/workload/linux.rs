//! Debian's stock kernel, with a busybox that rewrites files and compares their digests.

use std::path::PathBuf;

use parking_lot::Mutex;

use crate::root::target_directory;
use crate::{Failure, Root, kernel};
use sterna_cli::cpio::Archive;

/// The guest's init. Each tick checks one file of the tmpfs against the digest from its last write, and
/// writes it again. One round over the files writes random bytes, the next writes zeros. Every third round
/// removes the file first, so that its pages are freed. A second process does the same with another file in
/// parallel: it is random, zero, or removed.
const INIT: &str = r#"#!/bin/busybox sh
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs dev /dev
busybox mount -t tmpfs -o size=80% tmpfs /t
exec </dev/null >/dev/ttyS0 2>&1
FILES=32
write() {
    source=/dev/urandom
    [ $(($2 % 2)) = 1 ] && source=/dev/zero
    [ $(($2 % 3)) = 2 ] && busybox rm -f /t/$1
    busybox dd if=$source of=/t/$1 bs=128k count=1 conv=notrunc 2>/dev/null
}
digest() { D=$(busybox md5sum /t/$1); D=${D%% *}; }
i=0
while [ $i -lt $FILES ]; do
    write $i 0; digest $i; eval "s$i=$D"; i=$((i + 1))
done
(while :; do
    busybox dd if=/dev/urandom of=/t/hot bs=64k count=16 conv=notrunc 2>/dev/null
    busybox dd if=/dev/zero of=/t/hot bs=64k count=16 conv=notrunc 2>/dev/null
    busybox rm -f /t/hot
done) &
n=1; verdict=OK; sum=0
while :; do
    i=$((n % FILES))
    digest $i; eval "want=\$s$i"
    [ "$D" = "$want" ] || verdict=BAD
    write $i $((n / FILES)); digest $i; eval "s$i=$D"
    sum=$(echo "$sum $D" | busybox md5sum); sum=${sum%% *}
    echo "tick $n checksum $verdict $sum"
    n=$((n + 1))
done
"#;

/// Arguments for a machine that boots it.
pub(super) fn arguments(root: &Root) -> Result<Vec<String>, Failure> {
    let (kernel, initramfs) = prepared(root)?;
    Ok(vec![
        "-kernel".into(),
        kernel.display().to_string(),
        "-initrd".into(),
        initramfs.display().to_string(),
        "-append".into(),
        // random.trust_cpu is set, because no other source here would seed the generator soon.
        "console=ttyS0 quiet panic=-1 random.trust_bootloader=1 random.trust_cpu=1".into(),
        "-no-reboot".into(),
    ])
}

/// Whether kernel and initramfs are available.
pub(super) fn check(root: &Root) -> Result<(), Failure> {
    prepared(root).map(drop)
}

/// Paths of kernel and initramfs, which are made once for all tests.
fn prepared(root: &Root) -> Result<(PathBuf, PathBuf), Failure> {
    static READY: Mutex<Option<(PathBuf, PathBuf)>> = Mutex::new(None);
    let mut ready = READY.lock();
    if let Some(ready) = &*ready {
        return Ok(ready.clone());
    }
    let lab = target_directory().ok_or("this program lies outside of a target directory")?.join("lab");
    let kernel = kernel::image(&lab)?;
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", "t"] {
        archive.directory(directory);
    }
    let busybox = root.path().join("usr/bin/busybox");
    archive.file("bin/busybox", &std::fs::read(&busybox).map_err(|e| format!("{}: {e}", busybox.display()))?);
    archive.file("init", INIT.as_bytes());
    let initramfs = lab.join(format!("busybox.{}", std::process::id()));
    let place = lab.join("busybox");
    std::fs::write(&initramfs, archive.finish())
        .and_then(|()| std::fs::rename(&initramfs, &place))
        .map_err(|error| format!("{}: {error}", place.display()))?;
    Ok(ready.insert((kernel, place)).clone())
}
