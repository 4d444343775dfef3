//! What `sterna-standby` needs of this crate's inside. Hidden, because it changes in any version.

pub use crate::gathered::{Gathered, knowledge};
