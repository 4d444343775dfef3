//! Tests that need more than this host: real KVM in the lab VM.
//!
//! A [`scenarios::Scenario`] runs a guest in one machine, moves its state into a second and asks the
//! guest whether anything was lost. Those of plain integer instructions run on any KVM
//! (`tests/host.rs`); all of them run in the lab VM (`--bin lab`, [`lab`]), which emulates hardware
//! virtualisation and so has the kernel's whole KVM.

pub mod guests;
pub mod lab;
pub mod scenarios;
