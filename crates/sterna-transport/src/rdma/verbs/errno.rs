//! Errors of the libraries' calls.

use std::io;

use crate::rdma::error::RdmaError;

/// Makes an error of `errno`, for a call that has just failed.
pub(super) fn failed(subject: impl ToString, call: &'static str) -> RdmaError {
    error(subject, call, io::Error::last_os_error())
}

pub(super) fn error(subject: impl ToString, call: &'static str, source: io::Error) -> RdmaError {
    RdmaError::System { subject: subject.to_string(), call, source }
}
