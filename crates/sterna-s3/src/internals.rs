//! Decoders for the fuzz targets. Not a public interface.

use crate::listing::{ObjectsPage, UploadsPage};

/// The keys of a list of objects, which come after `last`; whether another page follows.
pub fn objects(text: &str, last: &str) -> Option<(Vec<String>, bool)> {
    let page = ObjectsPage::decode(text, last).ok()?;
    Some((page.objects.into_iter().map(|listed| listed.key).collect(), page.next.is_some()))
}

/// The keys and ids of a list of uploads.
pub fn uploads(text: &str) -> Option<Vec<(String, String)>> {
    let page = UploadsPage::decode(text).ok()?;
    Some(page.uploads.into_iter().map(|upload| (upload.key, upload.id)).collect())
}
