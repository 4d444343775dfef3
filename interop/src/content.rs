//! Fills a stopped guest's RAM. A check afterwards detects each lost or stale page.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::Failure;

/// Fills guest RAM in a file with four kinds of pages, a quarter each: noise, text that compresses, one
/// non-zero byte, zeros. Writes in place, because the machine maps this file.
///
/// # Errors
/// The file could not be written.
pub fn fill(path: &Path, seed: u64) -> Result<(), Failure> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut bytes = vec![0u8; std::fs::metadata(path).map_err(failed)?.len() as usize];
    let mut random = fastrand::Rng::with_seed(seed);
    for page in bytes.chunks_mut(4096) {
        match random.u8(..4) {
            0 => random.fill(page),
            1 => page.iter_mut().enumerate().for_each(|(at, byte)| *byte = b"sterna "[at % 7]),
            2 => page[random.usize(..4096)] = 1,
            _ => {}
        }
    }
    let file = std::fs::OpenOptions::new().write(true).open(path).map_err(failed)?;
    file.write_all_at(&bytes, 0).map_err(failed)
}
