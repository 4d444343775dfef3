//! Forms of images, by name.

use std::fmt;
use std::process::{Command, Stdio};
use std::str::FromStr;

use sterna_image::{Compression, Form};

use crate::drive::Settings;

/// libvirt knows *sparse* from this version on (specs/libvirt-save.md §2).
const SPARSE_SINCE: (u64, u64) = (11, 2);
/// QEMU knows mapped-ram from this version on.
const MAPPED_RAM_SINCE: (u64, u64) = (9, 0);

/// A form of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// In libvirt's container, or bare.
    pub is_libvirt: bool,
    /// Where the pages are.
    pub form: Form,
    /// How the stream is compressed; mapped-ram never is.
    pub compression: Compression,
}

impl Format {
    /// QEMU's own image with pages at fixed places.
    pub const MAPPED: Format =
        Format { is_libvirt: false, form: Form::Mapped, compression: Compression::None };
    /// QEMU's stream in a file.
    pub const LEGACY: Format =
        Format { is_libvirt: false, form: Form::Legacy, compression: Compression::None };
    /// libvirt's *sparse*: mapped-ram in its container.
    pub const LIBVIRT_SPARSE: Format =
        Format { is_libvirt: true, form: Form::Mapped, compression: Compression::None };
    /// libvirt's *raw*: QEMU's stream in its container.
    pub const LIBVIRT_RAW: Format =
        Format { is_libvirt: true, form: Form::Legacy, compression: Compression::None };

    const COMPRESSIONS: [Compression; 5] =
        [Compression::Gzip, Compression::Bzip2, Compression::Xz, Compression::Lzop, Compression::Zstd];

    /// Whether the stream is compressed.
    pub fn is_compressed(self) -> bool {
        self.compression != Compression::None
    }

    /// The newest form that this VM can write and load again.
    pub fn newest(settings: &Settings) -> Self {
        if settings.capability("mapped-ram").is_some() { Self::MAPPED } else { Self::LEGACY }
    }
}

/// The newest of libvirt's forms that both this VM and the libvirt on this machine know: *sparse*, else *raw*,
/// which all know. Nobody gets an image that yesterday's software cannot read without asking for it.
pub fn newest_libvirt_format(settings: &Settings) -> Format {
    newest_of(settings.capability("mapped-ram").is_some() && libvirt_knows_sparse())
}

/// As [`newest_libvirt_format`] where no VM can be asked: of an image that is converted, or that a peer sends. Then
/// the QEMU on this machine is what must know mapped-ram.
pub fn newest_libvirt_format_here() -> Format {
    newest_of(libvirt_knows_sparse() && qemu_knows_mapped_ram())
}

fn newest_of(is_sparse_known: bool) -> Format {
    if is_sparse_known { Format::LIBVIRT_SPARSE } else { Format::LIBVIRT_RAW }
}

/// By its daemon, which reads the images, else by its shell.
fn libvirt_knows_sparse() -> bool {
    version(&["virtqemud", "libvirtd", "virsh"]).is_some_and(|version| version >= SPARSE_SINCE)
}

/// By the names that distributions give it.
fn qemu_knows_mapped_ram() -> bool {
    let names = ["qemu-system-x86_64", "qemu-kvm", "/usr/libexec/qemu-kvm", "kvm"];
    version(&names).is_some_and(|version| version >= MAPPED_RAM_SINCE)
}

/// Version of the first of these programs that is there.
fn version(programs: &[&str]) -> Option<(u64, u64)> {
    programs.iter().find_map(|program| {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
        parse_version(&String::from_utf8_lossy(&output.stdout))
    })
}

/// The first `MAJOR.MINOR` in a text such as `virtqemud (libvirt) 12.8.0`.
fn parse_version(text: &str) -> Option<(u64, u64)> {
    text.split_whitespace().find_map(|word| {
        let mut numbers = word.split('.').map(str::parse::<u64>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    })
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let compressed =
            |text: &str| Self::COMPRESSIONS.into_iter().find(|compression| compression.name() == text);
        let found = match name {
            "mapped-ram" => Some(Self::MAPPED),
            "legacy" => Some(Self::LEGACY),
            "libvirt-sparse" => Some(Self::LIBVIRT_SPARSE),
            "libvirt-raw" => Some(Self::LIBVIRT_RAW),
            _ => name.split_once('-').and_then(|(container, compression)| {
                let is_libvirt = match container {
                    "libvirt" => true,
                    "legacy" => false,
                    _ => return None,
                };
                Some(Format { is_libvirt, form: Form::Legacy, compression: compressed(compression)? })
            }),
        };
        found.ok_or_else(|| {
            format!(
                "`{name}` is not an image format; formats are mapped-ram, legacy, libvirt-raw, libvirt-sparse, and \
                 libvirt- or legacy- followed by gzip, bzip2, xz, lzop or zstd"
            )
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.is_libvirt, self.form, self.compression) {
            (false, Form::Mapped, _) => f.write_str("mapped-ram"),
            (false, Form::Legacy, Compression::None) => f.write_str("legacy"),
            (false, Form::Legacy, compression) => write!(f, "legacy-{}", compression.name()),
            (true, Form::Mapped, _) => f.write_str("libvirt-sparse"),
            (true, Form::Legacy, compression) => write!(f, "libvirt-{}", compression.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_of_every_name_has_that_name() {
        for name in [
            "mapped-ram",
            "legacy",
            "legacy-zstd",
            "libvirt-raw",
            "libvirt-sparse",
            "libvirt-gzip",
            "libvirt-bzip2",
            "libvirt-xz",
            "libvirt-lzop",
            "libvirt-zstd",
        ] {
            assert_eq!(name.parse::<Format>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn format_of_another_name_says_what_there_is() {
        for name in ["", "sparse", "libvirt", "libvirt-", "legacy-raw", "qcow2", "mapped-ram-zstd"] {
            assert!(name.parse::<Format>().unwrap_err().contains("libvirt-sparse"), "{name}");
        }
    }

    #[test]
    fn version_is_found_in_what_programs_say() {
        assert_eq!(parse_version("virtqemud (libvirt) 12.8.0\n"), Some((12, 8)));
        assert_eq!(parse_version("9.0.0\n"), Some((9, 0)));
        assert_eq!(parse_version("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)\n"), Some((11, 1)));
        assert_eq!(parse_version("no version here"), None);
    }
}
