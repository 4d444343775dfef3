//! Fills and checks the RAM of the bench's guests.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use sterna_ram::RamBlock;

use super::MIB;
use crate::Failure;

const PAGE: usize = 4096;

/// The content of RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::lab::rdma) enum Load {
    /// Noise in every page.
    Random,
    /// Noise in the first half, zeros in the second.
    HalfZero,
    /// Noise in every second page.
    EverySecondPage,
}

impl Load {
    pub(super) const ALL: [Self; 3] = [Self::Random, Self::HalfZero, Self::EverySecondPage];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Random => "idle, random",
            Self::HalfZero => "idle, second half zero",
            Self::EverySecondPage => "idle, every second page zero",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|load| load.name() == name)
    }

    /// A MiB of the content at this offset, of `total` bytes. `None` where it is zero.
    pub(super) fn piece(self, at: u64, total: u64) -> Option<Vec<u8>> {
        if self == Self::HalfZero && at >= total / 2 {
            return None;
        }
        // The noise is made only once, because making it is slow here. A number in each page makes the pages
        // different.
        static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
        let noise = NOISE.get_or_init(|| {
            let mut noise = vec![0; MIB as usize];
            fastrand::Rng::with_seed(1).fill(&mut noise);
            noise
        });
        let mut bytes = noise.clone();
        for (number, page) in (at / PAGE as u64..).zip(bytes.chunks_mut(PAGE)) {
            if self == Self::EverySecondPage && number % 2 == 1 {
                page.fill(0);
            } else {
                page[..8].copy_from_slice(&(number + 1).to_le_bytes());
            }
        }
        Some(bytes)
    }
}

/// Fills untouched memory of this process.
pub(super) fn fill(block: &RamBlock, load: Load) -> Result<(), Failure> {
    let total = block.len_bytes();
    for at in (0..total).step_by(MIB as usize) {
        if let Some(bytes) = load.piece(at, total) {
            block.write(at, &bytes).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// Fills untouched memory of another process.
pub(super) fn fill_of(pid: u32, address: u64, total: u64, load: Load) -> Result<(), Failure> {
    let path = format!("/proc/{pid}/mem");
    let failed = |error: std::io::Error| format!("{path}: {error}");
    let file = OpenOptions::new().write(true).open(&path).map_err(failed)?;
    for at in (0..total).step_by(MIB as usize) {
        if let Some(bytes) = load.piece(at, total) {
            file.write_all_at(&bytes, address + at).map_err(failed)?;
        }
    }
    Ok(())
}

/// Checks that the memory of a process has this content.
pub(super) fn check_of(pid: u32, address: u64, total: u64, load: Load) -> Result<(), Failure> {
    let path = format!("/proc/{pid}/mem");
    let failed = |error: std::io::Error| format!("{path}: {error}");
    let file = OpenOptions::new().read(true).open(&path).map_err(failed)?;
    let mut found = vec![0; MIB as usize];
    for at in (0..total).step_by(MIB as usize) {
        file.read_exact_at(&mut found, address + at).map_err(failed)?;
        let wanted = load.piece(at, total).unwrap_or_else(|| vec![0; MIB as usize]);
        if found != wanted {
            return Err(format!("RAM arrived changed at {} MiB", at / MIB));
        }
    }
    Ok(())
}
