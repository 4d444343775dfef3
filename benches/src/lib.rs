//! What the benches that time whole programs share: machines in processes of their own, QEMU's and Sterna's, driven over
//! QMP by the same code, and their CPU time.

pub mod before;
pub mod clock;
pub mod goal;
pub mod link;
pub mod machines;
pub mod markdown;
pub mod peer;
pub mod raw;
pub mod words;

/// What went wrong, in words.
pub type Failure = String;
