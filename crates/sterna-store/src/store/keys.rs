//! Keys of a store's objects (`specs/image.md §10`).

/// Prefix of the objects of names.
pub(super) const NAMES: &str = "names/";
/// Prefix of the objects of images.
pub(super) const IMAGES: &str = "images/";
/// Prefix of packs.
pub(super) const PACKS: &str = "packs/";

/// The key of a pack.
pub(super) fn pack_key(id: &[u8; 16]) -> String {
    format!("{PACKS}{}", hex(id))
}

/// Whether a store gives such keys to its images and packs. Other objects may share a bucket with a store.
pub(super) fn is_of_store(key: &str) -> bool {
    let is_id = |id: &str, digits: usize| {
        id.len() == digits && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    match (key.strip_prefix(IMAGES), key.strip_prefix(PACKS)) {
        (Some(id), _) => is_id(id, 64),
        (_, Some(id)) => is_id(id, 32),
        _ => false,
    }
}

/// Bytes as digits of a key.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
