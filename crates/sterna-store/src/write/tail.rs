//! The end of an image: its index and its footer.

use crate::digest::Digest;
use crate::key::Crypt;
use crate::layout::{Footer, Index};

/// Index and footer of an image whose index is at `offset`, and its digest.
pub(super) fn tail(index: &Index, crypt: &Crypt, header: &[u8], offset: u64) -> (Vec<u8>, Digest) {
    let text = index.encode();
    let digest = crypt.digest(&[header, &text]);
    let text = [text, index.encode_optional(crypt, digest)].concat();
    let stored = crypt.seal(text, header);
    let footer = Footer { index_offset: offset, index_bytes: stored.len() as u64, digest };
    ([&stored[..], &footer.encode()].concat(), digest)
}
