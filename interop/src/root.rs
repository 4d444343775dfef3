//! The roots that `cargo xtask roots` builds. Their programs run without a chroot.
//!
//! Programs run in the host's own file namespace through the root's dynamic loader. Every path is therefore
//! the same for a test, for Sterna and for QEMU.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian's directory of libraries for this architecture.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// A Debian tree with programs to test against.
#[derive(Debug, Clone)]
pub struct Root {
    path: PathBuf,
}

impl Root {
    /// File that xtask writes when the root is complete.
    pub(crate) const STAMP: &str = "sterna-root";
    /// Directory of the root with QEMU.
    pub(crate) const QEMU: &str = "qemu";

    /// The root with QEMU. Without it, reports `test` as skipped.
    pub fn qemu_for(test: &str) -> Option<Self> {
        Self::named_for(Self::QEMU, test)
    }

    /// The root with QEMU, if it exists.
    pub(crate) fn qemu() -> Option<Self> {
        Self::found(Self::QEMU)
    }

    /// The root of the lab's Linux guests, if it exists.
    pub(crate) fn guest() -> Option<Self> {
        Self::found("guest")
    }

    /// The root with Debian 12's QEMU, 7.2. Without it, reports `test` as skipped.
    pub fn qemu_bookworm_for(test: &str) -> Option<Self> {
        Self::named_for("qemu-bookworm", test)
    }

    /// The root with Debian 13's QEMU, 10.0. Without it, reports `test` as skipped.
    pub fn qemu_trixie_for(test: &str) -> Option<Self> {
        Self::named_for("qemu-trixie", test)
    }

    /// The root with libvirt. Without it, reports `test` as skipped.
    pub fn libvirt_for(test: &str) -> Option<Self> {
        Self::named_for("libvirt", test)
    }

    /// The root with etcd. Without it, reports `test` as skipped.
    pub fn etcd_for(test: &str) -> Option<Self> {
        Self::named_for("etcd", test)
    }

    fn named_for(name: &str, test: &str) -> Option<Self> {
        let found = Self::found(name);
        if found.is_none() {
            skip(test, &format!("there is no root `{name}`: `cargo xtask roots {name}` builds it, as root"));
        }
        found
    }

    fn found(name: &str) -> Option<Self> {
        let places = places();
        let found = places.iter().map(|place| place.join(name)).find(|path| path.join(Self::STAMP).is_file());
        found.map(|path| Self { path })
    }

    /// Path of the root.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A program of the root, in `usr/bin`, `usr/sbin` or `usr/libexec`, ready to be run here.
    pub fn command(&self, program: &str) -> Command {
        let directories = ["usr/bin", "usr/sbin", "usr/libexec"].map(|directory| self.path.join(directory));
        let file = directories.iter().map(|directory| directory.join(program)).find(|file| file.is_file());
        let libraries = self.path.join(LIBRARIES);
        let mut command = Command::new(self.path.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries);
        command.arg(file.unwrap_or_else(|| directories[0].join(program)));
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command
    }

    /// The root's QEMU for x86-64, with the root's firmware.
    pub(crate) fn qemu_system(&self) -> Command {
        let mut command = self.command("qemu-system-x86_64");
        for firmware in ["qemu", "seabios"] {
            command.arg("-L").arg(self.path.join("usr/share").join(firmware));
        }
        command
    }

    /// The version of a Debian package in the root, if it is installed.
    pub fn version(&self, package: &str) -> Option<String> {
        let stamp = std::fs::read_to_string(self.path.join(Self::STAMP)).ok()?;
        stamp
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(' '))
            .find(|(name, _)| *name == package)
            .map(|(_, v)| v.to_owned())
    }
}

/// Whether guests can use `/dev/kvm`. If not, reports `test` as skipped.
pub fn kvm_for(test: &str) -> bool {
    let opened = open_kvm();
    if let Err(error) = &opened {
        skip(test, &format!("/dev/kvm: {error}"));
    }
    opened.is_ok()
}

/// Whether guests can use `/dev/kvm`.
pub(crate) fn has_kvm() -> bool {
    open_kvm().is_ok()
}

fn open_kvm() -> std::io::Result<std::fs::File> {
    std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm")
}

/// Prints that a test cannot run here, with the reason. xtask collects these lines. The test must return
/// afterwards.
pub fn skip(test: &str, reason: &str) {
    // Written directly, because libtest's capture would hide it from xtask. A write error is ignored.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
}

fn places() -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = std::env::var_os("STERNA_ROOTS").map(PathBuf::from).into_iter().collect();
    places.extend(target_directory().map(|target| target.join("roots")));
    places.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/roots"));
    places
}

/// The target directory that contains this program.
pub(crate) fn target_directory() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    let directory = exe.parent()?;
    let profile = if directory.ends_with("deps") { directory.parent()? } else { directory };
    profile.parent().map(Path::to_path_buf)
}
