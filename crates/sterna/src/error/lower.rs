//! Errors of the layers below, and of the VMM.

use std::error::Error;
use std::sync::Arc;

/// The error of a lower layer, which an error of the migration names.
pub type Cause = Arc<dyn Error + Send + Sync>;

/// Why the VMM could not perform the engine's request. Its fault is always local.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}: {why}")]
#[non_exhaustive]
pub struct VmError {
    /// The attempted operation, with its device or vCPU.
    pub what: String,
    /// The cause, and the next step for the operator.
    pub why: String,
}

impl VmError {
    /// Creates the error: the operation `what` failed because of `why`.
    pub fn new(what: impl Into<String>, why: impl ToString) -> Self {
        Self { what: what.into(), why: why.to_string() }
    }
}
