//! A VM as one side of a protection (`x-colo`): the primary, or the standby of another VM's guest.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use sterna_standby::{
    CheckpointCopy, CheckpointMode, Claims, EpochGate, Protection as Name, Secret, Terms, Watchdog,
};

/// The side of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It runs the guest.
    Primary,
    /// It stores the guest's checkpoints.
    Standby,
}

/// Creates the function that claims the guest of a protection from the arbiter, for a side.
pub type ClaimsOf = Arc<dyn Fn(Side, Name) -> Arc<dyn Claims> + Send + Sync>;
/// Decides the waiting claim. True: this side has won.
pub type Decide = Arc<dyn Fn(bool) -> Result<(), String> + Send + Sync>;
/// Repeats console output that may have been lost. The number is the bytes of output before it.
pub type SayAgain = Arc<dyn Fn(u64, &[u8]) + Send + Sync>;

/// The VM's settings and functions for being a side of a protection.
#[derive(Clone)]
pub struct ProtectionMeans {
    /// The secret that both sides share.
    pub secret: Secret,
    /// Whether a primary without a certificate is accepted over TCP. Only for loopback.
    pub is_insecure: bool,
    /// Lease and heartbeat times, which the primary sets.
    pub terms: Terms,
    /// The arbiter, which decides when the sides cannot reach each other.
    pub claims: ClaimsOf,
    /// Keeps the guest's output back until its checkpoint is held.
    pub gate: Arc<dyn EpochGate>,
    /// Repeats output after a takeover in this VM.
    pub say_again: SayAgain,
    /// The reasons why the guest cannot be protected. A device's output has no gate, or its state is in no
    /// checkpoint.
    pub unheld: Vec<String>,
    /// If an operator is the arbiter: decides the waiting claim for this side, or for the other.
    pub decide: Option<Decide>,
    /// Resets this host if the guest is not stopped at the end of its lease. A standby does not use it.
    pub watchdog: Option<Arc<dyn Watchdog>>,
}

/// The end of a protection at this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtectionEnd {
    /// The guest is here, and runs unprotected.
    Here {
        /// Whether an operator ended the protection.
        is_wanted: bool,
    },
    /// The other side has the guest.
    There {
        /// Whether it was handed over as planned.
        is_planned: bool,
    },
    /// The seeding failed, so the guest was never protected.
    Failed,
}

/// The monitor's view of a protection.
pub trait Protection: Send + Sync {
    /// QEMU's name for this side while the protection lasts.
    fn mode(&self) -> Option<&'static str>;
    /// All state and statistics, as JSON.
    fn report(&self) -> Value;
    /// The generation of the protection. 0 until this side knows it.
    fn generation(&self) -> u64;
    /// Whether the guest may run here now. Called before an operator's `cont` resumes it.
    fn may_guest_run(&self) -> bool {
        true
    }
    /// Ends the protection. The guest stays at the primary.
    ///
    /// # Errors
    /// The reason why it cannot be ended, or not from this side.
    fn unprotect(&self) -> Result<(), String>;
    /// Moves the guest to the standby. `is_planned`: with a last checkpoint.
    ///
    /// # Errors
    /// The reason why the standby cannot take over.
    fn take_over(&self, is_planned: bool) -> Result<(), String>;
    /// Decides as the arbiter, by the operator's command: the primary has the guest, or else the standby.
    ///
    /// # Errors
    /// No claim waits for a decision.
    fn decide(&self, is_at_primary: bool) -> Result<(), String>;
    /// Changes the interval between checkpoints.
    fn set_delay(&self, delay: Duration);
    /// Changes the condition for taking checkpoints. No effect at a standby.
    fn set_mode(&self, mode: CheckpointMode);
    /// Changes whether pages of checkpoints are copied while the guest is paused. No effect at a standby.
    fn set_copy(&self, way: CheckpointCopy);
    /// Changes how many checkpoints may be taken and not held yet. No effect at a standby.
    fn set_in_flight(&self, in_flight: u8);
    /// Waits for the end of the protection.
    fn wait(&self) -> ProtectionEnd;
}
