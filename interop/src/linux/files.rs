//! The files that a Linux guest boots from. They are made on the host, below the lab's directory, which has
//! the same path in the lab VM.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::certificates;
use crate::kernel::output;
use crate::scenarios::Failure;
use crate::{Root, kernel, root};
use sterna_cli::cpio::Archive;

/// Modules that a guest's kernel needs to find its devices and its root.
pub(crate) const MODULES: [&str; 8] = [
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_console",
    "virtio_balloon",
    "virtio_rng",
    "crc32c_generic",
    "ext4",
];
/// Size of the disk with the root, in bytes. Most of it is a hole.
const ROOT_BYTES: &str = "1G";

/// The directory of the files.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    directory: PathBuf,
}

impl Files {
    /// The files in this program's target directory.
    pub(crate) fn new() -> Result<Self, Failure> {
        let target = root::target_directory().ok_or("this program lies outside of a target directory")?;
        Ok(Self { directory: target.join("lab/linux") })
    }

    /// Path of the guest's kernel.
    pub(crate) fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// Path of the initial root: this program as its init, and modules.
    pub(crate) fn initrd(&self) -> PathBuf {
        self.directory.join("initrd")
    }

    /// The disk with a root of Debian packages, if it exists.
    pub(crate) fn root_disk(&self) -> Option<PathBuf> {
        Some(self.directory.join("root.img")).filter(|image| image.is_file())
    }

    /// The directory of certificates under QEMU's names.
    pub(super) fn certificates(&self) -> PathBuf {
        self.directory.join("tls")
    }

    /// Makes all files. `base` is an archive with the common files of all lab VMs. `modules` are in loading
    /// order.
    pub(crate) fn make(&self, lab: &Path, mut base: Archive, modules: &[Vec<u8>]) -> Result<(), Failure> {
        let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        std::fs::create_dir_all(&self.directory).map_err(|error| failed(&self.directory, error))?;
        std::fs::copy(kernel::image(lab)?, self.kernel()).map_err(|error| failed(&self.kernel(), error))?;
        for (index, module) in modules.iter().enumerate() {
            base.file(&format!("m/{index:02}"), module);
        }
        std::fs::write(self.initrd(), base.finish()).map_err(|error| failed(&self.initrd(), error))?;
        certificates::make(&self.certificates())?;
        Root::guest().map_or(Ok(()), |root| self.make_root_disk(&root))
    }

    /// Makes the disk, unless it exists and is newer than the root.
    fn make_root_disk(&self, root: &Root) -> Result<(), Failure> {
        let modified = |path: &Path| path.metadata().and_then(|data| data.modified()).ok();
        let image = self.directory.join("root.img");
        if modified(&image) > modified(&root.path().join(Root::STAMP)) {
            return Ok(());
        }
        // The disk is made under another name and then renamed. An interrupted run therefore leaves no
        // partial disk.
        let aside = self.directory.join(format!("root.img.{}", std::process::id()));
        let mut make = root.command("mke2fs");
        make.args(["-q", "-F", "-t", "ext4", "-d"]).arg(root.path()).arg(&aside).arg(ROOT_BYTES);
        output(&mut make)?;
        std::fs::rename(&aside, &image).map_err(|error| format!("{}: {error}", image.display()))
    }
}

/// Checks the file system on that disk with `e2fsck`.
pub(super) fn check_file_system(disk: &Path) -> Result<(), Failure> {
    output(Command::new("e2fsck").args(["-f", "-n"]).arg(disk)).map(drop)
}
