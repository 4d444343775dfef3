//! The authenticated messages after the greeting (`specs/replica.md §2`).

use super::arbiter::{self, ArbiterIdentity};
use super::hello::{Hello, Welcome};
use super::opening::{SPEC, bound};
use crate::error::WireError;
use crate::extension::{ChannelBinding, MigrationSecret};
use crate::reader;

const SESSION_LABEL: &str = "sterna replica session";
const PRIMARY_LABEL: &str = "sterna replica primary";
const STANDBY_LABEL: &str = "sterna replica standby";
const PRIMARY_ARBITER_LABEL: &str = "sterna replica primary's arbiter";
const STANDBY_ARBITER_LABEL: &str = "sterna replica standby's arbiter";

const NOT_AUTHENTIC: &str = "the message is not authentic at this position: the peer has another secret, or the \
                             message was changed on its way";

/// The side that sends a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The side that runs the guest.
    Primary,
    /// The side that stores the guest's checkpoints.
    Standby,
}

impl Role {
    fn other(self) -> Self {
        match self {
            Self::Primary => Self::Standby,
            Self::Standby => Self::Primary,
        }
    }
}

/// A message after the greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// Primary: a heartbeat, numbered from 1.
    Heartbeat(u64),
    /// Primary: asks to end the protection. The standby answers `Never` or `Runs`.
    Unprotect,
    /// Primary: the guest is paused for the standby. The last checkpoint is final.
    Give,
    /// Primary: the guest ended with its process, without an operator's request. The standby may take over.
    Gone,
    /// Standby: its progress, sent for every heartbeat and every checkpoint.
    Answer {
        /// The last checkpoint that is held; 0 before the first.
        held: u64,
        /// The last heartbeat that was read; 0 before the first.
        heartbeat: u64,
    },
    /// Standby: it has discarded everything and never runs the guest. Final.
    Never,
    /// Standby: the guest runs at the standby. Final.
    Runs,
    /// Standby: an operator has requested a planned takeover.
    HandOver,
}

impl Message {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 52;

    fn sender(self) -> Role {
        match self {
            Self::Heartbeat(_) | Self::Unprotect | Self::Give | Self::Gone => Role::Primary,
            Self::Answer { .. } | Self::Never | Self::Runs | Self::HandOver => Role::Standby,
        }
    }

    fn to_wire(self) -> (u32, u64, u64) {
        match self {
            Self::Heartbeat(number) => (1, number, 0),
            Self::Unprotect => (2, 0, 0),
            Self::Give => (3, 0, 0),
            Self::Gone => (4, 0, 0),
            Self::Answer { held, heartbeat } => (16, held, heartbeat),
            Self::Never => (17, 0, 0),
            Self::Runs => (18, 0, 0),
            Self::HandOver => (19, 0, 0),
        }
    }

    fn from_wire(kind: u32, first: u64, second: u64) -> Option<Self> {
        let message = match kind {
            1 => Self::Heartbeat(first),
            2 => Self::Unprotect,
            3 => Self::Give,
            4 => Self::Gone,
            16 => Self::Answer { held: first, heartbeat: second },
            17 => Self::Never,
            18 => Self::Runs,
            19 => Self::HandOver,
            _ => return None,
        };
        // Values that a message does not use must be zero.
        (message.to_wire() == (kind, first, second)).then_some(message)
    }
}

/// One side of a connection after the greeting.
///
/// A message is authentic only at its position. No message can be left out, repeated, or moved to another
/// connection.
#[derive(Debug, Clone)]
pub struct Session {
    role: Role,
    key: MigrationSecret,
    sent: u64,
    received: u64,
}

impl Session {
    /// The session that hello and welcome establish.
    pub fn new(
        role: Role,
        secret: &MigrationSecret,
        hello: &Hello,
        welcome: &Welcome,
        binding: &ChannelBinding,
    ) -> Self {
        let parts: [&[u8]; 4] = [&hello.protection_id, &hello.nonce, &welcome.nonce, &bound(binding)];
        let key = MigrationSecret::from_bytes(secret.mac(SESSION_LABEL, &parts));
        Self { role, key, sent: 0, received: 0 }
    }

    /// Appends this side's next message.
    ///
    /// # Errors
    /// The message belongs to the other role.
    pub fn seal(&mut self, message: Message, out: &mut Vec<u8>) -> Result<(), WireError> {
        if message.sender() != self.role {
            let rule = format!("{message:?} is not a message of a {:?}", self.role);
            return Err(WireError::local("replica message", 0, SPEC, rule));
        }
        let body = body(message);
        let mac = self.key.mac(label(self.role), &[&self.sent.to_be_bytes(), &body]);
        self.sent += 1;
        out.extend_from_slice(&body);
        out.extend_from_slice(&mac);
        Ok(())
    }

    /// Appends the identity of this side's arbiter: the first message of each side.
    ///
    /// # Errors
    /// The name or the text is too long.
    pub fn seal_arbiter(&mut self, identity: &ArbiterIdentity, out: &mut Vec<u8>) -> Result<(), WireError> {
        let body = identity.body()?;
        let mac = self.key.mac(arbiter_label(self.role), &[&self.sent.to_be_bytes(), &body]);
        self.sent += 1;
        out.extend_from_slice(&body);
        out.extend_from_slice(&mac);
        Ok(())
    }

    /// Reads the identity of the peer's arbiter from `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A broken rule; a message that is not authentic at its position.
    pub fn open_arbiter(&mut self, buf: &[u8]) -> Result<Option<(ArbiterIdentity, usize)>, WireError> {
        let read = reader::decode(buf, arbiter::MESSAGE, |r| {
            let identity = ArbiterIdentity::read(r)?;
            let (place, body) = (self.received.to_be_bytes(), &buf[..r.at()]);
            if !self.key.verify(arbiter_label(self.role.other()), &[&place, body], &r.array()?) {
                return Err(r.bad(SPEC, NOT_AUTHENTIC));
            }
            Ok(identity)
        })?;
        self.received += u64::from(read.is_some());
        Ok(read)
    }

    /// Reads the peer's next message from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// An unknown message; a message of this side's role; a message that is not authentic at its position.
    pub fn open(&mut self, buf: &[u8]) -> Result<Option<(Message, usize)>, WireError> {
        let read = reader::decode(buf, "replica message", |r| {
            let (kind, first, second) = (r.u32()?, r.u64()?, r.u64()?);
            let message = Message::from_wire(kind, first, second)
                .filter(|message| message.sender() != self.role)
                .ok_or_else(|| {
                    r.bad(SPEC, format!("type {kind} with {first} and {second} is not a message of the peer"))
                })?;
            let place = self.received.to_be_bytes();
            if !self.key.verify(label(message.sender()), &[&place, &body(message)], &r.array()?) {
                return Err(r.bad(SPEC, NOT_AUTHENTIC));
            }
            Ok(message)
        })?;
        self.received += u64::from(read.is_some());
        Ok(read)
    }
}

fn arbiter_label(sender: Role) -> &'static str {
    match sender {
        Role::Primary => PRIMARY_ARBITER_LABEL,
        Role::Standby => STANDBY_ARBITER_LABEL,
    }
}

fn label(sender: Role) -> &'static str {
    match sender {
        Role::Primary => PRIMARY_LABEL,
        Role::Standby => STANDBY_LABEL,
    }
}

fn body(message: Message) -> [u8; 20] {
    let (kind, first, second) = message.to_wire();
    let mut body = [0; 20];
    body[..4].copy_from_slice(&kind.to_be_bytes());
    body[4..12].copy_from_slice(&first.to_be_bytes());
    body[12..].copy_from_slice(&second.to_be_bytes());
    body
}
