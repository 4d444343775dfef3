//! No damage passes: each byte of a small image is changed.

use std::sync::Arc;

use sterna_store::{Key, MemoryBlob, NoBases, PAGE_BYTES, StoreError, StoredImage, WriteOptions};

use crate::common::{assert_has, write};

#[test]
fn each_changed_byte_of_an_image_is_found_by_the_check() {
    let mut rng = sterna_testing::random("each_changed_byte");
    let directory = tempfile::tempdir().unwrap();
    for key in [None, Some(Key::new([3; 32]))] {
        let path = directory.path().join(if key.is_some() { "keyed" } else { "plain" });
        let noise: Vec<u8> = (0..PAGE_BYTES).map(|_| rng.u8(..)).collect();
        let text: Vec<u8> = (0..PAGE_BYTES).map(|at| (at / 100) as u8).collect();
        let ram = vec![[noise, text.clone()].concat(), text];
        write(&path, &ram, WriteOptions { key: key.clone(), ..WriteOptions::default() }).unwrap();
        let bytes = std::fs::read(&path).unwrap();

        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << rng.u8(0..8);
            match open(changed, key.as_ref()) {
                Err(_) => {}
                Ok(image) => {
                    let checked = image.check(1).unwrap();
                    // A byte may be without meaning inside of a compressed frame. Then the content is the same.
                    if checked.damage.is_empty() {
                        assert_has(&image, &ram);
                        assert!(key.is_none(), "byte {at} of an encrypted image");
                    }
                }
            }
        }
    }
}

fn open(bytes: Vec<u8>, key: Option<&Key>) -> Result<Arc<StoredImage>, StoreError> {
    StoredImage::open_blob(Arc::new(MemoryBlob::new(bytes, "changed")), key, &NoBases)
}
