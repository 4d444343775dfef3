//! Lists of objects and of uploads, as an S3 server sends them.

use sterna_s3::internals::{objects, uploads};

/// Feeds one input to both decoders; panics if a check fails.
pub fn target(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some((keys, _)) = objects(text, "") {
        assert!(keys.is_sorted_by(|before, after| before < after), "keys that go back");
        // A page that comes again is refused, so that no list is endless.
        if let Some(last) = keys.last() {
            assert_eq!(objects(text, last), None);
        }
    }
    if let Some(begun) = uploads(text) {
        assert!(begun.len() <= text.matches("<Upload>").count());
    }
}
