//! Reads an object at random.

use std::sync::Arc;
use std::thread;

use sterna_store::{Blob, StoreError, Tag};

use crate::client::{Answer, Call, Client};

/// Shortest and longest range of a read that is several requests in parallel, in bytes.
const RANGES: (usize, usize) = (1 << 20, 16 << 20);

/// An object in the version that was opened.
pub(crate) struct S3Blob {
    client: Arc<Client>,
    key: String,
    name: String,
    tag: Tag,
    length_bytes: u64,
}

impl S3Blob {
    pub(crate) fn new(client: Arc<Client>, key: String, tag: Tag, length_bytes: u64) -> Self {
        let name = client.address(&key);
        Self { client, key, name, tag, length_bytes }
    }

    fn read_range(&self, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let last = offset + to.len() as u64 - 1;
        let headers = [("range", format!("bytes={offset}-{last}")), ("if-match", self.tag.0.clone())];
        let call = Call { key: &self.key, headers: &headers, limit: to.len() as u64 + 1, ..Call::default() };
        let answer = self.client.call(&call, |answer| self.check(answer, offset, last));
        match answer {
            Ok(answer) => {
                to.copy_from_slice(&answer.body);
                Ok(())
            }
            // The object was replaced or removed since it was opened.
            Err(refusal) if matches!(refusal.status, Some(404 | 412 | 416)) => {
                Err(StoreError::Changed { name: self.name.clone() })
            }
            Err(refusal) => Err(self.client.error(&self.key, refusal)),
        }
    }

    /// Whether the answer is the range that was asked for. A server that is wrong is asked again.
    fn check(&self, answer: &Answer, offset: u64, last: u64) -> Result<(), String> {
        let header =
            |name: &str| answer.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
        let wanted = format!("bytes {offset}-{last}/{}", self.length_bytes);
        if answer.status != 206 || header("content-range") != wanted {
            let (status, range) = (answer.status, header("content-range"));
            return Err(format!(
                "the server answered {status} with the range {range:?} instead of {wanted:?}"
            ));
        }
        if answer.body.len() as u64 != last - offset + 1 {
            let bytes = answer.body.len();
            return Err(format!("the server sent {bytes} bytes for {wanted:?}"));
        }
        if !header("etag").is_empty() && header("etag") != self.tag.0 {
            return Err(
                "the server sent another version of the object than the one that was asked for".to_owned()
            );
        }
        Ok(())
    }
}

impl Blob for S3Blob {
    fn len_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn read_exact_at(&self, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        if to.is_empty() {
            return Ok(());
        }
        if offset.checked_add(to.len() as u64).is_none_or(|end| end > self.length_bytes) {
            return Err(StoreError::Torn { name: self.name.clone(), length_bytes: self.length_bytes });
        }
        let parallel = self.client.options.parallel.clamp(1, 16);
        let length = to.len().div_ceil(parallel).clamp(RANGES.0, RANGES.1);
        if to.len() <= length {
            return self.read_range(offset, to);
        }
        let mut ranges: Vec<(u64, &mut [u8])> = to.chunks_mut(length).map(|part| (0, part)).collect();
        for (index, range) in ranges.iter_mut().enumerate() {
            range.0 = offset + (index * length) as u64;
        }
        while !ranges.is_empty() {
            let rest = ranges.split_off(parallel.min(ranges.len()));
            let batch = std::mem::replace(&mut ranges, rest);
            let results: Vec<_> = thread::scope(|scope| {
                let read = |(at, part)| scope.spawn(move || self.read_range(at, part));
                let threads: Vec<_> = batch.into_iter().map(read).collect();
                threads.into_iter().map(|thread| thread.join()).collect()
            });
            for result in results {
                result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
        }
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn version(&self) -> Option<&str> {
        Some(&self.tag.0)
    }
}
