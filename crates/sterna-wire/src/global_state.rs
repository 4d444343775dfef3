//! The run state of the guest before the source paused it (`specs/stream.md §1.10`).
//!
//! The source sends it as the FULL section `globalstate`. The destination decides with it whether to start the
//! guest.

use crate::error::WireError;

/// Name of the section on the wire.
pub const SECTION_NAME: &str = "globalstate";
/// Instance of the section on the wire.
pub const SECTION_INSTANCE: u32 = 0;
/// Version of the section's body.
pub const SECTION_VERSION: u32 = 1;
/// Length of the body, in bytes.
pub const BODY_BYTES: usize = 104;

const MESSAGE: &str = "globalstate section";
const SPEC: &str = "specs/stream.md §1.10";
const NAME_FIELD: usize = 32;

/// The body of the section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalState {
    /// QEMU's name of the run state: `running`, `paused`, `prelaunch`, `suspended` and others. At most 31
    /// bytes.
    pub run_state: String,
    /// Whether the guest was suspended before the source paused it; `None` if not stated.
    pub suspended: Option<bool>,
}

impl GlobalState {
    /// Whether a destination would start the guest, by QEMU's rules.
    pub fn wants_to_run(&self) -> bool {
        self.run_state == "running" || self.run_state == "suspended"
    }

    /// The body as it is on the wire.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when the name is not 1 to 31 bytes without NUL.
    pub fn encode(&self) -> Result<[u8; BODY_BYTES], WireError> {
        let name = self.run_state.as_bytes();
        if name.is_empty() || name.len() >= NAME_FIELD || name.contains(&0) {
            let rule = format!("run state {:?} is not 1 to 31 bytes without NUL", self.run_state);
            return Err(WireError::local(MESSAGE, 4, SPEC, rule));
        }
        let mut out = [0; BODY_BYTES];
        out[..4].copy_from_slice(&(name.len() as u32 + 1).to_be_bytes());
        out[4..4 + name.len()].copy_from_slice(name);
        out[36] = self.suspended.is_some().into();
        out[37] = self.suspended.unwrap_or(false).into();
        Ok(out)
    }

    /// Reads the body of a section.
    ///
    /// # Errors
    /// - a body whose length is not 104 bytes
    /// - a name whose length is not the stated one
    /// - a flag other than 0 or 1
    /// - a reserved byte that is not zero
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        let Some(body) = body.first_chunk::<BODY_BYTES>().filter(|_| body.len() == BODY_BYTES) else {
            return Err(bad(0, format!("{} bytes, not {BODY_BYTES}", body.len())));
        };
        let length = u32::from_be_bytes([body[0], body[1], body[2], body[3]]) as usize;
        if !(2..=NAME_FIELD).contains(&length) {
            return Err(bad(0, format!("a name of {length} bytes with its NUL, not 2 to {NAME_FIELD}")));
        }
        let (name, padding) = body[4..36].split_at(length - 1);
        if name.contains(&0) || padding.iter().any(|byte| *byte != 0) {
            return Err(bad(4, format!("the name is not {} bytes and then zeros", length - 1)));
        }
        let Ok(run_state) = std::str::from_utf8(name) else {
            return Err(bad(4, "the name is not UTF-8"));
        };
        let suspended = match (body[36], body[37]) {
            (0, 0) => None,
            (1, 0) => Some(false),
            (1, 1) => Some(true),
            _ => return Err(bad(36, "the two flags are not 0 0, 1 0 or 1 1")),
        };
        if body[38..].iter().any(|byte| *byte != 0) {
            return Err(bad(38, "a reserved byte is not zero"));
        }
        Ok(Self { run_state: run_state.to_owned(), suspended })
    }
}

fn bad(offset: u64, rule: impl Into<std::borrow::Cow<'static, str>>) -> WireError {
    WireError::misbehaved(MESSAGE, offset, SPEC, rule)
}
