//! A prefix of a bucket as an object storage.

use std::sync::Arc;
use std::time::SystemTime;

use rusty_s3::Method;
use sterna_store::{Blob, Condition, Listed, Objects, StoreError, Tag, Upload};

use crate::blob::S3Blob;
use crate::client::{Call, Client};
use crate::listing::{BegunUpload, ObjectsPage, UploadsPage};
use crate::options::S3Options;
use crate::requests::{head, is_whole, put, tag_of};
use crate::upload::{self, S3Upload};

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

    fn unreadable(&self, reason: String) -> StoreError {
        StoreError::Remote { name: self.client.name.clone(), reason, status: None }
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
        let call = Call { key: &key, limit: limit_bytes.saturating_add(1), ..Call::default() };
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
        let (mut token, mut last) = (None::<String>, String::new());
        loop {
            let mut query = Vec::new();
            if let Some(token) = &token {
                query.push(("continuation-token", token.as_str()));
            }
            query.extend([("list-type", "2"), ("prefix", whole.as_str())]);
            let page = ObjectsPage::decode(&self.page(&query)?, &last).map_err(|why| self.unreadable(why))?;
            for object in page.objects {
                last.clone_from(&object.key);
                if let Some(key) = self.inside(&object.key) {
                    visit(Listed { key: key.to_owned(), ..object })?;
                }
            }
            match page.next {
                None => return Ok(()),
                next if next == token => {
                    return Err(self.unreadable("the server's list repeats itself".to_owned()));
                }
                next => token = next,
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
            let page = UploadsPage::decode(&self.page(&query)?).map_err(|why| self.unreadable(why))?;
            for BegunUpload { key, id, began } in page.uploads {
                if began.is_some_and(|began| began < before) {
                    upload::abort(&self.client, &key, &id).map_err(|why| self.client.error(&key, why))?;
                    count += 1;
                }
            }
            if page.next.is_none() || page.next == marker {
                return Ok(count);
            }
            marker = page.next;
        }
    }
}
