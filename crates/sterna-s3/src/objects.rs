//! A prefix of a bucket as an object storage.

use std::sync::Arc;
use std::time::SystemTime;

use jiff::Timestamp;
use rusty_s3::Method;
use rusty_s3::actions::ListObjectsV2;
use sterna_store::{Blob, Condition, Listed, Objects, StoreError, Tag, Upload};

use crate::blob::S3Blob;
use crate::client::{Call, Client};
use crate::options::S3Options;
use crate::requests::{head, is_whole, put, tag_of};
use crate::upload::{self, S3Upload};
use crate::xml::{element, elements, unescaped};

/// A prefix of a bucket. Several threads may use it.
pub struct S3Objects {
    client: Arc<Client>,
}

impl S3Objects {
    /// Prepares the requests; sends none.
    ///
    /// # Errors
    /// [`StoreError::Remote`] for an endpoint or a CA file that cannot be used.
    pub fn new(options: S3Options) -> Result<Self, StoreError> {
        Ok(Self { client: Arc::new(Client::new(options)?) })
    }

    fn page(&self, query: &[(&str, &str)]) -> Result<String, StoreError> {
        let call = Call { query, ..Call::default() };
        let answer = self.client.call(&call, |_| Ok(())).map_err(|why| self.client.error("", why))?;
        Ok(String::from_utf8_lossy(&answer.body).into_owned())
    }

    fn unreadable(&self, what: &str) -> StoreError {
        StoreError::Remote { name: self.client.name.clone(), reason: what.to_owned(), status: None }
    }

    /// A key without the prefix, if it is in the prefix.
    fn inside<'a>(&self, whole_key: &'a str) -> Option<&'a str> {
        match self.client.options.prefix.as_str() {
            "" => Some(whole_key),
            prefix => whole_key.strip_prefix(prefix)?.strip_prefix('/'),
        }
    }
}

impl Objects for S3Objects {
    fn name(&self) -> &str {
        &self.client.name
    }

    fn get(&self, key: &str, limit_bytes: u64) -> Result<(Vec<u8>, Tag), StoreError> {
        let key = self.client.key(key);
        let call = Call { key: &key, limit: limit_bytes + 1, ..Call::default() };
        let answer = self.client.call(&call, is_whole).map_err(|why| match why.status {
            Some(status) if status < 300 => {
                StoreError::TooLarge { name: self.client.address(&key), limit_bytes }
            }
            _ => self.client.error(&key, why),
        })?;
        if answer.body.len() as u64 > limit_bytes {
            return Err(StoreError::TooLarge { name: self.client.address(&key), limit_bytes });
        }
        let tag = tag_of(&answer.headers).unwrap_or(Tag(String::new()));
        Ok((answer.body, tag))
    }

    fn open(&self, key: &str) -> Result<Arc<dyn Blob>, StoreError> {
        let key = self.client.key(key);
        let (tag, length) = head(&self.client, &key)?;
        Ok(Arc::new(S3Blob::new(Arc::clone(&self.client), key, tag, length)))
    }

    fn put(&self, key: &str, bytes: &[u8], condition: Condition<'_>) -> Result<Tag, StoreError> {
        put(&self.client, &self.client.key(key), bytes, condition)
    }

    fn upload(&self, key: &str) -> Result<Box<dyn Upload>, StoreError> {
        Ok(Box::new(S3Upload::new(Arc::clone(&self.client), self.client.key(key))))
    }

    fn list(
        &self,
        prefix: &str,
        visit: &mut dyn FnMut(Listed) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let whole = self.client.key(prefix);
        let mut token: Option<String> = None;
        let mut last = String::new();
        loop {
            let mut query = Vec::new();
            if let Some(token) = &token {
                query.push(("continuation-token", token.as_str()));
            }
            query.extend([("list-type", "2"), ("prefix", whole.as_str())]);
            let text = self.page(&query)?;
            let page = ListObjectsV2::parse_response(&text)
                .map_err(|error| self.unreadable(&format!("the server's list: {error}")))?;
            for object in page.contents {
                // A list that repeats itself would never end.
                if object.key <= last {
                    return Err(self.unreadable("the server's list is not in ascending order"));
                }
                last.clone_from(&object.key);
                let Some(key) = self.inside(&object.key) else { continue };
                let modified =
                    object.last_modified.as_deref().and_then(|time| time.parse::<Timestamp>().ok());
                visit(Listed {
                    key: key.to_owned(),
                    length_bytes: object.size.unwrap_or(0),
                    modified: modified.map_or(SystemTime::now(), SystemTime::from),
                    tag: object.etag.map(|tag| Tag(unescaped(&tag))),
                })?;
            }
            token = page.next_continuation_token;
            if token.is_none() {
                return Ok(());
            }
        }
    }

    fn delete(&self, key: &str) -> Result<(), StoreError> {
        let key = self.client.key(key);
        let call = Call { method: Method::Delete, key: &key, ..Call::default() };
        match self.client.call(&call, |_| Ok(())) {
            Err(refusal) if refusal.status != Some(404) => Err(self.client.error(&key, refusal)),
            _ => Ok(()),
        }
    }

    fn abort_uploads(&self, before: SystemTime) -> Result<u64, StoreError> {
        let prefix = self.client.key("");
        let (mut marker, mut count) = (None::<(String, String)>, 0);
        loop {
            let mut query = Vec::new();
            if let Some((key, _)) = &marker {
                query.push(("key-marker", key.as_str()));
            }
            query.push(("prefix", prefix.as_str()));
            if let Some((_, id)) = &marker {
                query.push(("upload-id-marker", id.as_str()));
            }
            query.push(("uploads", ""));
            let text = self.page(&query)?;
            for one in elements(&text, "Upload") {
                let part = |name: &str| element(one, name).map(unescaped);
                let (Some(key), Some(id), Some(began)) = (part("Key"), part("UploadId"), part("Initiated"))
                else {
                    return Err(self.unreadable("the server's list of uploads lacks a key, an id or a time"));
                };
                let began = began.parse::<Timestamp>().map(SystemTime::from);
                if began.is_ok_and(|began| began < before) {
                    upload::abort(&self.client, &key, &id).map_err(|why| self.client.error(&key, why))?;
                    count += 1;
                }
            }
            let next = |name: &str| element(&text, name).map(unescaped);
            let following = next("NextKeyMarker").zip(next("NextUploadIdMarker"));
            if element(&text, "IsTruncated") != Some("true") || following.is_none() || following == marker {
                return Ok(count);
            }
            marker = following;
        }
    }
}
