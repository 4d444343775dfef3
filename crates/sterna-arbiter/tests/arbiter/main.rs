//! The integration tests of this crate: one module per subject, all linked into one program.
//!
//! `cargo test -p sterna-arbiter --test arbiter SUBJECT::` runs the tests of one subject.

mod commands;
mod etcd;
mod fake;
mod races;

use std::time::Duration;

use sterna_arbiter::{Claim, Claimant, Generation, GuestName, Opened, Role, Ruling, Spec};

/// Time limit of operations that must succeed, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn claimant(process: &str) -> Claimant {
    Claimant::new(Role::Standby, process).expect("a name")
}

fn claim(process: &str, generation: u64) -> Claim {
    Claim {
        guest: GuestName::new("guest").expect("a name"),
        generation: Generation::new(generation),
        claimant: claimant(process),
    }
}

fn lost(winner: &str) -> Ruling {
    Ruling::Lost { winner: Some(claimant(winner)) }
}

fn open(spec: &str, limit: Duration) -> Opened {
    spec.parse::<Spec>().expect("a spec").open(limit).expect("opened")
}
