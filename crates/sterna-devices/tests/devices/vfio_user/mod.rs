//! Tests of VFIO's migration states and of the vfio-user protocol, with the statebank device model.
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
