//! The server's lists of objects and of uploads, one page at a time.

use std::time::SystemTime;

use jiff::Timestamp;
use rusty_s3::actions::ListObjectsV2;
use sterna_store::{Listed, Tag};

use crate::xml::{element, elements, unescaped};

/// A page of a list of objects, whose keys are whole.
#[derive(Debug)]
pub(crate) struct ObjectsPage {
    pub(crate) objects: Vec<Listed>,
    /// Where the next page begins; none after the last one.
    pub(crate) next: Option<String>,
}

/// An upload that was begun.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BegunUpload {
    pub(crate) key: String,
    pub(crate) id: String,
    /// None if the server's time cannot be read.
    pub(crate) began: Option<SystemTime>,
}

/// A page of a list of uploads.
#[derive(Debug)]
pub(crate) struct UploadsPage {
    pub(crate) uploads: Vec<BegunUpload>,
    /// Key and upload after which the next page begins; none after the last one.
    pub(crate) next: Option<(String, String)>,
}

impl ObjectsPage {
    /// Decodes a page whose keys come after `last`. A list that repeats itself would never end.
    pub(crate) fn decode(text: &str, last: &str) -> Result<Self, String> {
        let page =
            ListObjectsV2::parse_response(text).map_err(|error| format!("the server's list: {error}"))?;
        let mut objects: Vec<Listed> = Vec::new();
        for object in page.contents {
            if object.key.as_str() <= objects.last().map_or(last, |before| before.key.as_str()) {
                return Err("the server's list is not in ascending order".to_owned());
            }
            let modified = object.last_modified.as_deref().and_then(|time| time.parse::<Timestamp>().ok());
            objects.push(Listed {
                key: object.key,
                length_bytes: object.size.unwrap_or(0),
                // An object without a time counts as new, so that no collection takes it for old.
                modified: modified.map_or_else(SystemTime::now, SystemTime::from),
                tag: object.etag.map(|tag| Tag(unescaped(&tag))),
            });
        }
        Ok(Self { objects, next: page.next_continuation_token })
    }
}

impl UploadsPage {
    pub(crate) fn decode(text: &str) -> Result<Self, String> {
        let mut uploads = Vec::new();
        for one in elements(text, "Upload") {
            let part = |name: &str| element(one, name).map(unescaped);
            let (Some(key), Some(id), Some(began)) = (part("Key"), part("UploadId"), part("Initiated"))
            else {
                return Err("the server's list of uploads lacks a key, an id or a time".to_owned());
            };
            let began = began.parse::<Timestamp>().ok().map(SystemTime::from);
            uploads.push(BegunUpload { key, id, began });
        }
        let next = |name: &str| element(text, name).map(unescaped);
        let is_truncated = element(text, "IsTruncated") == Some("true");
        let next = next("NextKeyMarker").zip(next("NextUploadIdMarker")).filter(|_| is_truncated);
        Ok(Self { uploads, next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_that_goes_back_is_refused() {
        let page = |keys: &[&str], token: &str| {
            let objects: String =
                keys.iter().map(|key| format!("<Contents><Key>{key}</Key></Contents>")).collect();
            let name = r#"xmlns="http://s3.amazonaws.com/doc/2006-03-01/""#;
            format!("<ListBucketResult {name}>{objects}{token}</ListBucketResult>")
        };
        let token = "<NextContinuationToken>x</NextContinuationToken>";

        let good = ObjectsPage::decode(&page(&["a", "b"], token), "").unwrap();
        assert_eq!((good.objects.len(), good.next.as_deref()), (2, Some("x")));
        assert!(ObjectsPage::decode(&page(&["b", "a"], ""), "").is_err());
        assert!(ObjectsPage::decode(&page(&["b"], ""), "b").is_err());
        assert!(ObjectsPage::decode("<html>", "").is_err());
    }

    #[test]
    fn upload_without_a_readable_time_is_never_old() {
        let upload = |time: &str| {
            format!(
                "<R><Upload><Key>a&amp;b</Key><UploadId>1</UploadId><Initiated>{time}</Initiated></Upload></R>"
            )
        };

        let page = UploadsPage::decode(&upload("2020-01-01T00:00:00Z")).unwrap();
        assert_eq!((page.uploads[0].key.as_str(), page.uploads[0].began.is_some()), ("a&b", true));
        assert_eq!(UploadsPage::decode(&upload("yesterday")).unwrap().uploads[0].began, None);
        assert!(UploadsPage::decode("<R><Upload><Key>a</Key></Upload></R>").is_err());
    }
}
