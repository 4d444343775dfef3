//! Requests about one object that several parts need.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rusty_s3::Method;
use sterna_store::{Condition, StoreError, Tag};
use ureq::http::HeaderMap;

use crate::client::{Answer, Call, Client};

/// The header with the checksum of a body. The server checks it, so that bytes that changed on the way are refused.
pub(crate) const CHECKSUM: &str = "x-amz-checksum-crc32";

/// The checksum of a body as the header has it.
pub(crate) fn checksum(bytes: &[u8]) -> String {
    STANDARD.encode(crc32fast::hash(bytes).to_be_bytes())
}

/// Writes a small object in one request.
pub(crate) fn put(
    client: &Client,
    key: &str,
    bytes: &[u8],
    condition: Condition<'_>,
) -> Result<Tag, StoreError> {
    let headers = condition_header(condition);
    let signed = [(CHECKSUM, checksum(bytes))];
    let call =
        Call { method: Method::Put, key, headers: &headers, signed: &signed, body: bytes, ..Call::default() };
    match client.call(&call, |_| Ok(())) {
        Ok(answer) => tag_of(&answer.headers).map_or_else(|| head(client, key).map(|(tag, _)| tag), Ok),
        // An earlier attempt may have written the object, and its answer was lost.
        Err(refusal) if refusal.was_repeated && matches!(refusal.status, Some(409 | 412)) => {
            let call = Call { key, limit: bytes.len() as u64 + 1, ..Call::default() };
            let conflict = client.error(key, refusal);
            let Ok(found) = client.call(&call, is_whole) else { return Err(conflict) };
            match tag_of(&found.headers).filter(|_| found.body == bytes) {
                Some(tag) => Ok(tag),
                None => Err(conflict),
            }
        }
        Err(refusal) => Err(client.error(key, refusal)),
    }
}

/// Version and length of an object.
pub(crate) fn head(client: &Client, key: &str) -> Result<(Tag, u64), StoreError> {
    let call = Call { method: Method::Head, key, ..Call::default() };
    let answer = client.call(&call, |_| Ok(())).map_err(|why| client.error(key, why))?;
    let length = answer.headers.get("content-length").and_then(|value| value.to_str().ok()?.parse().ok());
    match (tag_of(&answer.headers), length) {
        (Some(tag), Some(length)) => Ok((tag, length)),
        _ => Err(StoreError::Remote {
            name: client.address(key),
            reason: "the server sent no ETag or no length".to_owned(),
            status: Some(answer.status),
        }),
    }
}

pub(crate) fn tag_of(headers: &HeaderMap) -> Option<Tag> {
    headers.get("etag").and_then(|value| value.to_str().ok()).map(|tag| Tag(tag.to_owned()))
}

/// The header of a condition.
pub(crate) fn condition_header(condition: Condition<'_>) -> Vec<(&'static str, String)> {
    match condition {
        Condition::IfAbsent => vec![("if-none-match", "*".to_owned())],
        Condition::IfMatch(tag) => vec![("if-match", tag.0.clone())],
        Condition::Always => Vec::new(),
    }
}

/// Whether the body has the length that the server announced.
pub(crate) fn is_whole(answer: &Answer) -> Result<(), String> {
    let length =
        answer.headers.get("content-length").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match length {
        Some(length) if length != answer.body.len() as u64 => {
            Err(format!("the server announced {length} bytes and sent {}", answer.body.len()))
        }
        _ => Ok(()),
    }
}
