//! Decoders for the fuzz targets. Not a public interface.

use crate::digest::Digest;
use crate::key::Crypt;
use crate::layout::header::HeaderError;
use crate::layout::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, Index, Sections, features};
use crate::recipe::Recipe;

/// Decodes a header, and encodes it again.
pub fn header(bytes: &[u8; HEADER_BYTES]) -> Option<[u8; HEADER_BYTES]> {
    match Header::decode(&checked(*bytes)) {
        Ok(header) => Some(header.encode()),
        Err(HeaderError::NotAnImage | HeaderError::Unsupported(_) | HeaderError::Broken(_)) => None,
    }
}

/// Decodes a footer, and encodes it again.
pub fn footer(bytes: &[u8; FOOTER_BYTES]) -> Option<[u8; FOOTER_BYTES]> {
    Footer::decode(&checked(*bytes)).ok().map(|footer| footer.encode())
}

/// Decodes an index, and encodes it again.
pub fn index(bytes: &[u8], extent_bytes: u32) -> Option<Vec<u8>> {
    let index = Index::decode(&Sections::split(bytes).ok()?, extent_bytes).ok()?;
    Some([index.encode(), index.encode_optional(&Crypt::new(None), Digest::default())].concat())
}

/// Decodes a recipe for blocks of these lengths, and encodes it again.
pub fn recipe(bytes: &[u8], blocks: &[u64]) -> Option<Vec<u8>> {
    Recipe::decode(bytes, blocks).ok().map(|recipe| recipe.encode())
}

/// The frames and the index of a plain image.
pub fn parts(image: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let footer = image.last_chunk().and_then(|footer| Footer::decode(footer).ok())?;
    let at = usize::try_from(footer.index_offset).ok()?;
    let index = image.get(at..image.len() - FOOTER_BYTES)?;
    Some((image.get(HEADER_BYTES..at)?.to_vec(), index.to_vec()))
}

/// A plain image of these frames and this index, with valid checksums.
pub fn image(frames: &[u8], index: &[u8], extent_bytes: u32, is_layer: bool) -> Vec<u8> {
    let incompatible = if is_layer { features::LAYER } else { 0 };
    let header =
        Header { incompatible, compatible: 0, extent_bytes, salt: [0; 32], key_check: [0; 16] }.encode();
    let crypt = Crypt::new(None);
    // What cannot be split is refused before its digest is compared.
    let digest =
        Sections::split(index).map_or(Digest::default(), |sections| sections.digest(&crypt, &header));
    let index_offset = (HEADER_BYTES + frames.len()) as u64;
    let footer = Footer { index_offset, index_bytes: index.len() as u64, digest };
    [&header[..], frames, index, &footer.encode()].concat()
}

/// Replaces the checksum at the end, so that changed fields are reached.
fn checked<const N: usize>(mut bytes: [u8; N]) -> [u8; N] {
    let sum = blake3::hash(&bytes[..N - 8]);
    bytes[N - 8..].copy_from_slice(&sum.as_bytes()[..8]);
    bytes
}
