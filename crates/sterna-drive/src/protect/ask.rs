//! The function type through which the steps out of COLO send commands to a QEMU. Several programs implement it.

use serde_json::Value;

use crate::error::DriveError;

/// Executes a QMP command with arguments.
pub(super) type Ask<'a> = dyn FnMut(&str, Value) -> Result<Value, DriveError> + 'a;
