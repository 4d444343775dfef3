//! Writes a large object in parts. Nothing is visible before the end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rusty_s3::Method;
use rusty_s3::actions::CreateMultipartUpload;
use sterna_store::{Condition, StoreError, Tag, Unfinished, Upload};

use crate::client::{Call, Client, Refusal};
use crate::requests::{CHECKSUM, checksum, condition_header, head, put, tag_of};

/// Largest number of parts of an object.
const MOST_PARTS: usize = 10_000;

/// An upload that was not completed. Dropping it aborts it.
pub(crate) struct S3Upload {
    client: Arc<Client>,
    key: String,
    buffer: Vec<u8>,
    /// The server's name of the upload, after the first part.
    id: Option<String>,
    /// The parts that are stored, in their order.
    parts: Vec<Part>,
    sending: VecDeque<JoinHandle<Result<Part, Refusal>>>,
    bytes: u64,
    is_complete: bool,
    /// Aborts the upload if the process ends at a signal.
    unfinished: Option<Unfinished>,
}

/// A stored part.
struct Part {
    tag: String,
    checksum: String,
}

impl S3Upload {
    pub(crate) fn new(client: Arc<Client>, key: String) -> Self {
        Self {
            client,
            key,
            buffer: Vec::new(),
            id: None,
            parts: Vec::new(),
            sending: VecDeque::new(),
            bytes: 0,
            is_complete: false,
            unfinished: None,
        }
    }

    /// Begins to send the buffer as the next part.
    fn send(&mut self) -> Result<(), StoreError> {
        let id = match &self.id {
            Some(id) => id.clone(),
            None => self.begin()?,
        };
        while self.sending.len() >= self.client.options.parallel.clamp(1, 16) {
            self.finish_one()?;
        }
        let number = self.parts.len() + self.sending.len() + 1;
        if number > MOST_PARTS {
            let reason = format!("the object needs more than {MOST_PARTS} parts: save with larger parts");
            return Err(StoreError::Remote { name: self.client.address(&self.key), reason, status: None });
        }
        let (client, key, body) =
            (Arc::clone(&self.client), self.key.clone(), std::mem::take(&mut self.buffer));
        self.sending.push_back(thread::spawn(move || {
            let number = number.to_string();
            let query = [("partNumber", number.as_str()), ("uploadId", id.as_str())];
            let checksum = checksum(&body);
            let signed = [(CHECKSUM, checksum.clone())];
            let call =
                Call { method: Method::Put, query: &query, signed: &signed, body: &body, ..Call::of(&key) };
            let has_tag = |answer: &crate::client::Answer| match tag_of(&answer.headers) {
                Some(_) => Ok(()),
                None => Err("the server sent no ETag for a part".to_owned()),
            };
            let answer = client.call(&call, has_tag)?;
            let tag = tag_of(&answer.headers).map(|tag| tag.0).unwrap_or_default();
            Ok(Part { tag, checksum })
        }));
        Ok(())
    }

    fn begin(&mut self) -> Result<String, StoreError> {
        let query = [("uploads", "")];
        // Each part has a checksum of this kind.
        let signed = [("x-amz-checksum-algorithm", "CRC32".to_owned())];
        let call = Call { method: Method::Post, query: &query, signed: &signed, ..Call::of(&self.key) };
        let answer = self.client.call(&call, |_| Ok(())).map_err(|why| self.client.error(&self.key, why))?;
        let text = String::from_utf8_lossy(&answer.body);
        let response = CreateMultipartUpload::parse_response(&text);
        let response = response.map_err(|error| StoreError::Remote {
            name: self.client.address(&self.key),
            reason: format!("the server's answer to the beginning of an upload: {error}"),
            status: Some(answer.status),
        })?;
        let id = response.upload_id().to_owned();
        self.id = Some(id.clone());
        let (client, key, aborted) = (Arc::clone(&self.client), self.key.clone(), id.clone());
        self.unfinished = Some(Unfinished::new(move || drop(abort(&client, &key, &aborted))));
        Ok(id)
    }

    /// Waits for the oldest part that is being sent.
    fn finish_one(&mut self) -> Result<(), StoreError> {
        let Some(thread) = self.sending.pop_front() else { return Ok(()) };
        let sent = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.parts.push(sent.map_err(|why| self.client.error(&self.key, why))?);
        Ok(())
    }

    fn finish(&mut self, id: &str, condition: Condition<'_>) -> Result<Tag, StoreError> {
        let parts = self.parts.iter().enumerate().map(|(index, Part { tag, checksum })| {
            let number = index + 1;
            format!(
                "<Part><ChecksumCRC32>{checksum}</ChecksumCRC32><ETag>{tag}</ETag><PartNumber>{number}</PartNumber></Part>"
            )
        });
        let body =
            format!("<CompleteMultipartUpload>{}</CompleteMultipartUpload>", parts.collect::<String>());
        let (query, headers) = ([("uploadId", id)], condition_header(condition));
        let call = Call {
            method: Method::Post,
            key: &self.key,
            query: &query,
            headers: &headers,
            body: body.as_bytes(),
            ..Call::default()
        };
        // The server may answer 200 before it knows the result, which is then in the body.
        let is_complete = |answer: &crate::client::Answer| {
            let text = String::from_utf8_lossy(&answer.body);
            match crate::xml::element(&text, "ETag") {
                Some(_) => Ok(()),
                None => Err("the server did not complete the upload".to_owned()),
            }
        };
        match self.client.call(&call, is_complete) {
            Ok(answer) => {
                let text = String::from_utf8_lossy(&answer.body);
                let tag = crate::xml::element(&text, "ETag").unwrap_or_default();
                Ok(Tag(crate::xml::unescaped(tag)))
            }
            // An earlier attempt was performed, and its answer was lost: the upload does not exist any more.
            Err(refusal) if refusal.was_repeated && self.is_gone(id, refusal.status) => {
                let (tag, length) = head(&self.client, &self.key)?;
                if length == self.bytes {
                    return Ok(tag);
                }
                Err(self.client.error(&self.key, refusal))
            }
            Err(refusal) => Err(self.client.error(&self.key, refusal)),
        }
    }

    /// Whether a completion that was refused with `status` finds no upload. The object's own presence may be the reason.
    fn is_gone(&self, id: &str, status: Option<u16>) -> bool {
        let query = [("uploadId", id)];
        let call = Call { query: &query, ..Call::of(&self.key) };
        let is_missing =
            || self.client.call(&call, |_| Ok(())).is_err_and(|refusal| refusal.status == Some(404));
        status == Some(404) || matches!(status, Some(409 | 412)) && is_missing()
    }

    fn abort(&mut self) {
        // Parts that still arrive after the abort would stay.
        for thread in self.sending.drain(..) {
            let _ = thread.join();
        }
        let Some(id) = self.id.take() else { return };
        if let Err(refusal) = abort(&self.client, &self.key, &id) {
            tracing::warn!(
                "{}: an upload could not be aborted ({}); `sterna store gc` removes it",
                self.client.address(&self.key),
                refusal.reason
            );
        }
    }
}

/// Aborts an upload.
pub(crate) fn abort(client: &Client, key: &str, id: &str) -> Result<(), Refusal> {
    let query = [("uploadId", id)];
    let call = Call { method: Method::Delete, key, query: &query, ..Call::default() };
    match client.call(&call, |_| Ok(())) {
        Err(refusal) if refusal.status != Some(404) => Err(refusal),
        _ => Ok(()),
    }
}

impl Upload for S3Upload {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let part = self.client.options.part_bytes;
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.buffer.len() >= part {
                self.send()?;
            }
            let count = rest.len().min(part - self.buffer.len());
            self.buffer.extend_from_slice(&rest[..count]);
            self.bytes += count as u64;
            rest = &rest[count..];
        }
        Ok(())
    }

    fn complete(mut self: Box<Self>, condition: Condition<'_>) -> Result<Tag, StoreError> {
        if self.id.is_none() {
            // It is small enough for one request.
            let tag = put(&self.client, &self.key, &self.buffer, condition)?;
            self.is_complete = true;
            return Ok(tag);
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        while !self.sending.is_empty() {
            self.finish_one()?;
        }
        let id = self.id.clone().unwrap_or_default();
        let tag = self.finish(&id, condition)?;
        self.is_complete = true;
        Ok(tag)
    }
}

impl Drop for S3Upload {
    fn drop(&mut self) {
        if !self.is_complete {
            self.abort();
        }
    }
}
