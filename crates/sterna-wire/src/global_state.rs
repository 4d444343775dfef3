//! The run state that the guest had before it was stopped (`specs/stream.md §1.10`).
//!
//! It travels as the FULL section `globalstate`, and tells the destination whether to start the guest.

use crate::error::WireError;

/// Name of the section.
pub const SECTION_NAME: &str = "globalstate";
/// Its instance.
pub const SECTION_INSTANCE: u32 = 0;
/// Its version.
pub const SECTION_VERSION: u32 = 1;
/// Length of its body in bytes.
pub const BODY_BYTES: usize = 104;

const MESSAGE: &str = "globalstate section";
const SPEC: &str = "specs/stream.md §1.10";
const NAME_FIELD: usize = 32;

/// The body of the section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalState {
    /// QEMU's name of the run state: `running`, `paused`, `prelaunch`, `suspended`, … At most 31 bytes.
    pub run_state: String,
    /// Whether the guest was suspended when it was stopped; `None` when the sender does not say.
    pub suspended: Option<bool>,
}

impl GlobalState {
    /// Whether QEMU would start the guest.
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
    /// A body that is not 104 bytes, a name that does not have the stated length, a flag that is not 0 or 1,
    /// a reserved byte that is not zero.
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
