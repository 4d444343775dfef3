//! Frames: pages that are compressed, and encrypted if the image is (`specs/image.md §7`).

use std::cell::RefCell;
use std::io;

use zstd::bulk::{Compressor, Decompressor};

use crate::digest::Digest;
use crate::key::{Crypt, SEAL_BYTES};
use crate::layout::{FrameEntry, PAGE_BYTES};

/// A frame as it is stored.
pub(crate) struct Packed {
    pub(crate) stored: Vec<u8>,
    pub(crate) is_raw: bool,
}

/// Makes frames, on one thread.
pub(crate) struct Packer {
    zstd: Option<Compressor<'static>>,
}

impl Packer {
    /// Makes a packer with zstd's `level`; 0 means no compression.
    pub(crate) fn new(level: i32) -> io::Result<Self> {
        let zstd = if level == 0 { None } else { Some(Compressor::new(level)?) };
        Ok(Self { zstd })
    }

    /// Changes zstd's level; 0 means no compression.
    pub(crate) fn set_level(&mut self, level: i32) -> io::Result<()> {
        match &mut self.zstd {
            Some(zstd) if level != 0 => zstd.set_compression_level(level),
            _ => Self::new(level).map(|packer| *self = packer),
        }
    }

    /// Compresses and encrypts `pages`, whose digest is `digest`.
    pub(crate) fn pack(&mut self, crypt: &Crypt, digest: Digest, pages: &[u8]) -> io::Result<Packed> {
        let compressed = self.zstd.as_mut().map(|zstd| zstd.compress(pages)).transpose()?;
        // A frame that compression shortens by less than a sixteenth is stored raw, because it is read faster then.
        let most = pages.len() - pages.len() / 16;
        let (text, is_raw) = match compressed.filter(|compressed| compressed.len() <= most) {
            Some(compressed) => (compressed, false),
            None => (pages.to_vec(), true),
        };
        Ok(Packed { stored: crypt.seal(text, &digest.0), is_raw })
    }
}

/// The largest stored length of a frame with `pages` pages.
pub(crate) fn stored_most(pages: u16, crypt: &Crypt) -> usize {
    usize::from(pages) * PAGE_BYTES + if crypt.is_on() { SEAL_BYTES } else { 0 }
}

/// Decrypts, decompresses and checks a frame. Returns its pages, or what is wrong with it.
///
/// No byte of a frame leaves this function before its digest was checked.
pub(crate) fn unpack(crypt: &Crypt, entry: &FrameEntry, stored: Vec<u8>) -> Result<Vec<u8>, String> {
    let length = usize::from(entry.pages) * PAGE_BYTES;
    let Some(text) = crypt.unseal(stored, &entry.digest.0) else {
        return Err("it does not decrypt".to_owned());
    };
    let pages = match entry.is_raw {
        true => text,
        // The capacity is the limit: a frame that expands further is refused, and no memory is allocated for it.
        false => match decompress(&text, length) {
            Ok(pages) => pages,
            Err(error) => return Err(format!("it does not decompress to {length} bytes: {error}")),
        },
    };
    if pages.len() != length {
        return Err(format!("it expands to {} bytes instead of {length}", pages.len()));
    }
    match crypt.digest(&[&pages]) == entry.digest {
        true => Ok(pages),
        false => Err("its pages have another digest than the index names".to_owned()),
    }
}

fn decompress(text: &[u8], most: usize) -> io::Result<Vec<u8>> {
    thread_local! {
        /// zstd's context is larger than a frame, and making one takes as long as decompressing it.
        static ZSTD: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
    }
    ZSTD.with_borrow_mut(|kept| {
        let zstd = match kept {
            Some(zstd) => zstd,
            None => kept.insert(Decompressor::new()?),
        };
        zstd.decompress(text, most)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;

    fn entry(packed: &Packed, digest: Digest, pages: u16) -> FrameEntry {
        let stored_bytes = packed.stored.len() as u32;
        FrameEntry { pack: 0, offset: 0, stored_bytes, is_raw: packed.is_raw, pages, digest }
    }

    #[test]
    fn frame_unpacks_to_its_pages_and_no_changed_byte_passes() {
        for key in [None, Some(Key::new([9; 32]))] {
            let crypt = Crypt::new(key.as_ref());
            let pages: Vec<u8> = (0..2 * PAGE_BYTES).map(|at| (at / 100) as u8).collect();
            let digest = crypt.digest(&[&pages]);
            for level in [0, 1] {
                let packed = Packer::new(level).unwrap().pack(&crypt, digest, &pages).unwrap();
                let entry = entry(&packed, digest, 2);

                assert_eq!(packed.is_raw, level == 0);
                assert!(packed.stored.len() <= stored_most(2, &crypt));
                assert_eq!(unpack(&crypt, &entry, packed.stored.clone()).as_deref(), Ok(&pages[..]));
                for at in (0..packed.stored.len()).step_by(7) {
                    let mut changed = packed.stored.clone();
                    changed[at] ^= 0x20;
                    let done = unpack(&crypt, &entry, changed);
                    assert!(done.is_err() || done.as_deref() == Ok(&pages[..]), "byte {at}");
                }
            }
        }
    }

    #[test]
    fn frame_that_expands_too_far_or_not_far_enough_is_refused() {
        let crypt = Crypt::new(None);
        let pages = vec![7; 4 * PAGE_BYTES];
        let digest = crypt.digest(&[&pages]);
        let packed = Packer::new(1).unwrap().pack(&crypt, digest, &pages).unwrap();

        for claimed in [3, 5] {
            assert!(unpack(&crypt, &entry(&packed, digest, claimed), packed.stored.clone()).is_err());
        }
    }
}
