//! The content of guest RAM. It is written into the memory files of any machine, and verified later.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sterna_interop::{Accelerator, Guest, Qemu, Ram, Root};
use xxhash_rust::xxh3::Xxh3;

use crate::Failure;

const PAGE_BYTES: usize = 4096;
/// RAM is read and written in pieces of this size.
const PIECE_BYTES: usize = 1 << 20;
/// Length of the runs of equal kind in [`Kind::Half`].
const HALF_RUN_BYTES: usize = 256 << 10;
/// Number of checks that the Linux guest completes before its RAM is copied.
const LINUX_TICKS: usize = 20;

/// The kind of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Random words that do not compress.
    Random,
    /// Runs of 256 KiB, alternating random words and zeros.
    Half,
    /// Zero pages, all of them allocated.
    Zero,
    /// RAM of a Linux that QEMU ran. Debian's kernel runs a busybox that writes files in a tmpfs.
    Linux,
}

/// A content of `bytes` bytes.
pub struct Content {
    pub kind: Kind,
    pub bytes: u64,
    template: Option<PathBuf>,
    /// Hash of all bytes in order, and the number of bytes in non-zero pages. Known after the content was
    /// written once.
    known: Cell<Option<(u64, u64)>>,
}

impl Content {
    /// Prepares the content. A Linux guest is booted now, and its RAM is stored as a file in `directory`.
    pub fn new(kind: Kind, bytes: u64, root: Option<&Root>, directory: &Path) -> Result<Self, Failure> {
        let template = match kind {
            Kind::Linux => Some(linux(bytes, root.ok_or("no QEMU to boot a Linux guest in")?, directory)?),
            _ => None,
        };
        Ok(Self { kind, bytes, template, known: Cell::new(None) })
    }

    /// Writes the content into RAM, which allocates it.
    pub fn put(&self, ram: &[File]) -> Result<(), Failure> {
        check_size(ram, self.bytes)?;
        let template =
            self.template.as_ref().map(File::open).transpose().map_err(|error| error.to_string())?;
        let mut random = fastrand::Rng::with_seed(1);
        let (mut digest, mut used) = (Xxh3::new(), 0);
        for_each_piece(ram, |file, at, offset, piece| {
            match &template {
                Some(template) => template.read_exact_at(piece, at)?,
                None => fill(self.kind, &mut random, piece),
            }
            digest.update(piece);
            used += piece.chunks(PAGE_BYTES).filter(|page| page.iter().any(|byte| *byte != 0)).count();
            file.write_all_at(piece, offset)
        })?;
        self.known.set(Some((digest.digest(), (used * PAGE_BYTES) as u64)));
        Ok(())
    }

    /// Fails unless RAM has this content.
    pub fn check(&self, ram: &[File]) -> Result<(), Failure> {
        check_size(ram, self.bytes)?;
        let mut digest = Xxh3::new();
        for_each_piece(ram, |file, _, offset, piece| {
            file.read_exact_at(piece, offset)?;
            digest.update(piece);
            Ok(())
        })?;
        match self.known.get() {
            Some((wanted, _)) if wanted == digest.digest() => Ok(()),
            _ => Err("what arrived is not what left".into()),
        }
    }

    /// Bytes in pages that are not zero. Before the first `put`, the length of the content.
    pub fn used_bytes(&self) -> u64 {
        self.known.get().map_or(self.bytes, |(_, used)| used)
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        if let Some(template) = &self.template {
            // A file that cannot be removed stays in the target directory.
            let _ = std::fs::remove_file(template);
        }
    }
}

fn fill(kind: Kind, random: &mut fastrand::Rng, piece: &mut [u8]) {
    piece.fill(0);
    for (number, run) in piece.chunks_mut(HALF_RUN_BYTES).enumerate() {
        if kind == Kind::Random || kind == Kind::Half && number % 2 == 0 {
            random.fill(run);
        }
    }
}

/// Calls `act` for each piece of RAM. Its arguments: file, offset in all of RAM, offset in the file, and a
/// buffer for the bytes.
fn for_each_piece(
    ram: &[File],
    mut act: impl FnMut(&File, u64, u64, &mut [u8]) -> std::io::Result<()>,
) -> Result<(), Failure> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut begin = 0;
    for file in ram {
        let len = file.metadata().map_err(|error| error.to_string())?.len();
        for offset in (0..len).step_by(PIECE_BYTES) {
            let piece = &mut piece[..(len - offset).min(PIECE_BYTES as u64) as usize];
            act(file, begin + offset, offset, piece).map_err(|error| format!("guest RAM: {error}"))?;
        }
        begin += len;
    }
    Ok(())
}

fn check_size(ram: &[File], bytes: u64) -> Result<(), Failure> {
    let mut found = 0;
    for file in ram {
        found += file.metadata().map_err(|error| error.to_string())?.len();
    }
    if found == bytes {
        Ok(())
    } else {
        Err(format!("{found} bytes of memory files, not the {bytes} of RAM"))
    }
}

/// RAM of a Linux guest that has run for a while.
fn linux(bytes: u64, root: &Root, directory: &Path) -> Result<PathBuf, Failure> {
    if !Guest::Linux.available_for(root, "content linux") {
        return Err("the Linux guest cannot be had here".into());
    }
    let builder = Qemu::builder(root).accelerator(Accelerator::Tcg).memory_mib(bytes >> 20);
    let mut guest = builder.ram(Ram::Memfd).guest(Guest::Linux).spawn()?;
    guest.wait_for_ticks(LINUX_TICKS)?;
    guest.stop()?;
    let path = directory.join(format!("linux-{}.ram", std::process::id()));
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let to = File::create(&path).map_err(failed)?;
    to.set_len(bytes).map_err(failed)?;
    let ram = sterna_benches::peer::ram_of(guest.pid())?;
    check_size(&ram, bytes)?;
    for_each_piece(&ram, |file, at, offset, piece| {
        file.read_exact_at(piece, offset)?;
        if piece.iter().all(|byte| *byte == 0) { Ok(()) } else { to.write_all_at(piece, at) }
    })?;
    Ok(path)
}
