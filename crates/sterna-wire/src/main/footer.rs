//! Distinguishes a footer from data that looks like one (`specs/stream.md §1.6`, method B).
//!
//! The body of an unknown device has no length, so that its footer is the only sign of its end.

use super::command;
use super::element::{COMMAND, END, EOF, FOOTER, FOOTER_BYTES, FULL, PART, START, VM_DESCRIPTION};
use std::collections::HashSet;

/// The meaning of the bytes at one position of an opaque body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judgement {
    /// The section's footer: a plausible element follows it.
    Footer,
    /// Bytes of the body.
    Body,
    /// So many bytes from this position are needed to decide.
    NeedMore(usize),
}

/// The state of the stream that decides which continuations are plausible.
pub(super) struct Context<'a> {
    /// Id of the section that is being read.
    pub(super) id: u32,
    /// Whether the stream ends with EOF, without a description.
    pub(super) no_description: bool,
    /// Whether an earlier section has this id.
    pub(super) is_used: &'a dyn Fn(u32) -> bool,
    /// Whether the section with this id still has parts to follow.
    pub(super) is_open: &'a dyn Fn(u32) -> bool,
}

/// Judges `bytes`, which start with `7e` or with the first bytes of a footer.
pub(super) fn judge(bytes: &[u8], context: &Context<'_>) -> Judgement {
    let mut footer = [FOOTER; FOOTER_BYTES];
    footer[1..].copy_from_slice(&context.id.to_be_bytes());
    let shared = bytes.len().min(FOOTER_BYTES);
    if bytes[..shared] != footer[..shared] {
        return Judgement::Body;
    }
    let next = bytes.get(FOOTER_BYTES..).unwrap_or_default();
    match continuation(next, context) {
        Ok(true) => Judgement::Footer,
        Ok(false) => Judgement::Body,
        Err(needed) => Judgement::NeedMore(FOOTER_BYTES + needed),
    }
}

/// Whether `next` can be the start of an element. `Err`: so many bytes are needed to decide.
fn continuation(next: &[u8], context: &Context<'_>) -> Result<bool, usize> {
    match next.first() {
        None => Err(1),
        Some(&(START | FULL)) => header(next, context),
        Some(&(PART | END)) => Ok((context.is_open)(id(next)?)),
        Some(&COMMAND) => command::plausible(&next[1..]).ok_or(5),
        Some(&EOF) if context.no_description => Ok(true),
        Some(&EOF) => match next.get(1..7) {
            // 06, a length, and "{" unless the length is 0.
            Some(head) => Ok(head[0] == VM_DESCRIPTION && (head[5] == b'{' || head[1..5] == [0; 4])),
            None if next.get(1..6) == Some(&[VM_DESCRIPTION, 0, 0, 0, 0]) => Ok(true),
            None => Err(next.len().saturating_add(1).max(6)),
        },
        Some(_) => Ok(false),
    }
}

fn header(next: &[u8], context: &Context<'_>) -> Result<bool, usize> {
    if (context.is_used)(id(next)?) {
        return Ok(false);
    }
    let length = usize::from(*next.get(5).ok_or(6usize)?);
    if length == 0 {
        return Ok(false);
    }
    let whole = 6 + length + 8;
    if next.len() < whole {
        return Err(whole);
    }
    Ok(next[6..6 + length].iter().all(|byte| byte.is_ascii_graphic() || *byte == b' '))
}

fn id(next: &[u8]) -> Result<u32, usize> {
    let bytes = next.get(1..5).ok_or(5usize)?;
    Ok(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// Position of the footer of section `id`, searched from `from`.
///
/// A footer at the end of the received bytes needs no continuation.
pub(super) fn foot(bytes: &[u8], from: usize, id: u32, used: &HashSet<u32>) -> Option<usize> {
    let context = Context {
        id,
        // An EOF at the end of the received bytes counts as a continuation that is not complete yet.
        no_description: false,
        is_used: &|id| used.contains(&id),
        is_open: &|_| false,
    };
    let mut at = from;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == FOOTER)?;
        match judge(&bytes[at..], &context) {
            Judgement::Footer => return Some(at),
            Judgement::NeedMore(_) if bytes.len() >= at + FOOTER_BYTES => return Some(at),
            _ => at += 1,
        }
    }
}
