//! The typed reason of an error, wherever in its chain of sources, and warnings.

use std::error::Error;
use std::io;
use std::sync::Arc;

use sterna::error::Cause;
use sterna::rdma::StreamFailure;
use sterna::{Event, MigrationError, VmError};
use sterna_transport::StreamError;

/// The error of type `E` that `error` is, or that it names as its source.
pub fn cause<'a, E: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a E> {
    if let Some(found) = error.downcast_ref::<E>() {
        return Some(found);
    }
    if let Some(found) = error.downcast_ref::<Arc<E>>() {
        return Some(found);
    }
    inner(error).or_else(|| error.source()).and_then(cause)
}

/// The error that `error` contains without naming it as its source, because both have the same text.
fn inner<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    if let Some(shared) = error.downcast_ref::<Cause>() {
        return Some(&**shared);
    }
    if let Some(io) = error.downcast_ref::<io::Error>() {
        return io.get_ref().map(|inner| inner as _);
    }
    if let Some(StreamFailure::Wire(broken)) = error.downcast_ref() {
        return Some(broken);
    }
    match error.downcast_ref()? {
        StreamError::Rdma(error) => Some(error),
        StreamError::Protocol(error) => Some(&**error),
        _ => None,
    }
}

/// The VMM's error with which a migration failed.
#[track_caller]
pub fn vm_error(error: &MigrationError) -> &VmError {
    let MigrationError::Vm(why) = error else { panic!("{error:?}") };
    why
}

/// Whether one warning has all `words`. A warning is a sentence for an operator and has no type.
pub fn has_warning(events: &[Event], words: &[&str]) -> bool {
    let has =
        |event: &Event| matches!(event, Event::Warning(text) if words.iter().all(|word| text.contains(word)));
    events.iter().any(has)
}
