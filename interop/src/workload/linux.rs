//! Debian's stock kernel, with a busybox whose one job is to rewrite files and compare their digests.

use std::path::PathBuf;

use parking_lot::Mutex;

use crate::root::target_directory;
use crate::{Failure, Root, kernel};
use sterna_cli::cpio::Archive;

/// The guest's init. Each tick checks one file of the tmpfs against the digest that was taken when it was
/// written, and writes it anew; a second process rewrites another file all the while.
const INIT: &str = r#"#!/bin/busybox sh
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs dev /dev
busybox mount -t tmpfs -o size=80% tmpfs /t
exec </dev/null >/dev/ttyS0 2>&1
FILES=32
write() { busybox dd if=/dev/urandom of=/t/$1 bs=128k count=1 conv=notrunc 2>/dev/null; }
digest() { D=$(busybox md5sum /t/$1); D=${D%% *}; }
i=0
while [ $i -lt $FILES ]; do
    write $i; digest $i; eval "s$i=$D"; i=$((i + 1))
done
(while :; do busybox dd if=/dev/urandom of=/t/hot bs=64k count=16 conv=notrunc 2>/dev/null; done) &
n=1; verdict=OK; sum=0
while :; do
    i=$((n % FILES))
    digest $i; eval "want=\$s$i"
    [ "$D" = "$want" ] || verdict=BAD
    write $i; digest $i; eval "s$i=$D"
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
        // random.trust_cpu: nothing else here would seed the generator soon.
        "console=ttyS0 quiet panic=-1 random.trust_bootloader=1 random.trust_cpu=1".into(),
        "-no-reboot".into(),
    ])
}

/// Whether kernel and initramfs can be had.
pub(super) fn check(root: &Root) -> Result<(), Failure> {
    prepared(root).map(drop)
}

/// Kernel and initramfs, made once for all tests.
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
