//! VFIO's migration states, the vfio-user protocol, and the device model that tests them.
#![allow(clippy::print_stderr, missing_docs)]

mod dma;
mod engine;
mod faults;
mod hostile;
mod library;
mod moving;
mod process;
mod slow;
mod support;
mod wire;
