//! Names of images in stores (`specs/image.md §10`).

use crate::digest::Digest;
use crate::error::StoreError;

/// Refuses a name that is no part of a key, or that looks like a digest.
pub(crate) fn check_name(name: &str) -> Result<(), StoreError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_good =
        !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.bytes().all(is_plain);
    if is_good && name.parse::<Digest>().is_err() {
        return Ok(());
    }
    let text = format!(
        "{name:?} is not a name for an image: use up to 200 letters, digits, - _ . (no . at the start)"
    );
    Err(StoreError::Request(text))
}
