//! A VM as a side of a protection: its guest is protected by a standby, or it is the standby of another's guest (`x-colo`).

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use sterna::replica::{CheckpointCopy, CheckpointMode, Claims, EpochGate, Protection as Name, Secret, Terms};

/// Which side of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It runs the guest.
    Primary,
    /// It holds the guest's checkpoints.
    Standby,
}

/// The arbiter's claim of a protection, for a side.
pub type ClaimsOf = Arc<dyn Fn(Side, Name) -> Arc<dyn Claims> + Send + Sync>;
/// Decides the claim that waits: whether this side has won.
pub type Decide = Arc<dyn Fn(bool) -> Result<(), String> + Send + Sync>;
/// Says what a guest had said that nobody may have heard, and how many bytes it had said before.
pub type SayAgain = Arc<dyn Fn(u64, &[u8]) + Send + Sync>;

/// What a VM has for being a side of a protection.
#[derive(Clone)]
pub struct ProtectionMeans {
    /// What both sides know.
    pub secret: Secret,
    /// Whether a primary that shows no certificate is taken over TCP, on loopback.
    pub is_insecure: bool,
    /// The times, which the primary sets.
    pub terms: Terms,
    /// Who decides when the sides cannot reach each other.
    pub claims: ClaimsOf,
    /// Holds what the guest says.
    pub gate: Arc<dyn EpochGate>,
    /// For a guest that goes on here.
    pub say_again: SayAgain,
    /// Why the guest cannot be protected: devices whose output no gate holds, or whose content no checkpoint carries.
    pub unheld: Vec<String>,
    /// Where an operator is the arbiter: gives the claim that waits to this side, or to the other.
    pub decide: Option<Decide>,
}

/// How a protection ended at this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtectionEnd {
    /// The guest is here, and runs unprotected.
    Here {
        /// It was the operator's wish.
        is_wanted: bool,
    },
    /// The other side has it.
    There {
        /// It was handed over as planned.
        is_planned: bool,
    },
    /// Nothing was protected: the seeding failed.
    Failed,
}

/// A protection, as a monitor sees it.
pub trait Protection: Send + Sync {
    /// QEMU's word for this side, while the protection lasts.
    fn mode(&self) -> Option<&'static str>;
    /// All that is known.
    fn report(&self) -> Value;
    /// That of the protection; 0 while this side does not know it.
    fn generation(&self) -> u64;
    /// Ends it with the guest at the primary.
    ///
    /// # Errors
    /// Why it cannot be ended, or not here.
    fn unprotect(&self) -> Result<(), String>;
    /// The guest goes to the standby; `is_planned`: with a last checkpoint.
    ///
    /// # Errors
    /// Why it cannot.
    fn take_over(&self, is_planned: bool) -> Result<(), String>;
    /// The operator is the arbiter, and says who has the guest: the primary, or else the standby.
    ///
    /// # Errors
    /// Nothing waits for that.
    fn decide(&self, is_at_primary: bool) -> Result<(), String>;
    /// Changes the interval between checkpoints.
    fn set_delay(&self, delay: Duration);
    /// Changes what decides when checkpoints are taken. At a standby it does nothing.
    fn set_mode(&self, mode: CheckpointMode);
    /// Changes whether pages of checkpoints are copied while the guest stands. At a standby it does nothing.
    fn set_copy(&self, way: CheckpointCopy);
    /// Changes how many checkpoints may be taken and not be held yet. At a standby it does nothing.
    fn set_in_flight(&self, in_flight: u8);
    /// Waits for the end.
    fn wait(&self) -> ProtectionEnd;
}
