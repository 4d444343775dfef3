//! What the benches that time whole programs share: machines in processes of their own, QEMU's and Sterna's, driven over
//! QMP by the same code, and their CPU time.

pub mod clock;
pub mod machines;
pub mod markdown;
pub mod peer;

/// What went wrong, in words.
pub type Failure = String;
