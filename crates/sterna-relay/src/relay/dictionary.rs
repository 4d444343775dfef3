//! `--dictionary`: pages of an image that the relay at the destination has.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::frame::PAGE_BYTES;
use crate::pack::{Dictionary, MOST_ANNOUNCED, PageHash};

const CHUNK_BYTES: usize = 1 << 20;

/// The pages of a file, at multiples of 4 KiB: a raw image, or an uncompressed one whose pages are aligned.
///
/// The memory holds 12 bytes for each page with other content than zeros; the content stays in the file. If the file
/// changes, the changed pages are missing.
#[derive(Debug)]
pub struct ImageDictionary {
    file: File,
    /// Page numbers in the file, by the first 8 bytes of the pages' hashes.
    pages: HashMap<u64, u32>,
}

/// A dictionary that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("dictionary {}: {source}: give a file that this user can read", path.display())]
pub struct DictionaryError {
    /// The file.
    pub path: PathBuf,
    /// The error of the operating system.
    pub source: std::io::Error,
}

impl ImageDictionary {
    /// Reads a whole file. At most [`MOST_ANNOUNCED`] different pages of it are used.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn open(path: &Path) -> Result<Self, DictionaryError> {
        Self::read(path).map_err(|source| DictionaryError { path: path.to_owned(), source })
    }

    /// Number of different pages.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    fn read(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        let mut pages = HashMap::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut number = 0_u32;
        loop {
            let filled = read_chunk(&file, &mut chunk, u64::from(number) * PAGE_BYTES as u64)?;
            for page in chunk[..filled].chunks_exact(PAGE_BYTES) {
                if pages.len() < MOST_ANNOUNCED && page.iter().any(|byte| *byte != 0) {
                    pages.entry(PageHash::of(page).prefix()).or_insert(number);
                }
                number = number.saturating_add(1);
            }
            if filled < CHUNK_BYTES || pages.len() >= MOST_ANNOUNCED || number == u32::MAX {
                return Ok(Self { file, pages });
            }
        }
    }
}

fn read_chunk(file: &File, chunk: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < chunk.len() {
        match file.read_at(&mut chunk[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

impl Dictionary for ImageDictionary {
    fn copy(&self, page: &PageHash, to: &mut [u8; PAGE_BYTES]) -> bool {
        let Some(number) = self.pages.get(&page.prefix()) else { return false };
        let read = self.file.read_exact_at(to, u64::from(*number) * PAGE_BYTES as u64);
        // The file may have changed since it was read.
        read.is_ok() && PageHash::of(to) == *page
    }

    fn prefixes(&self) -> Vec<u64> {
        self.pages.keys().copied().collect()
    }
}
