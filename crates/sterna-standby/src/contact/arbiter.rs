//! Checks that both sides ask the same arbiter (`specs/replica.md §1`). Two arbiters could give the claim to both
//! sides.

use std::time::Duration;

use sterna::internals::threads;
use sterna_wire::replica::{ArbiterIdentity, ArbiterStore};

use super::error::ContactError;
use super::link::Link;
use super::runner::Claims;

/// Time limit for the peer's identity message. The peer first asks its arbiter, which has a limit of its own.
const WORD_LIMIT: Duration = Duration::from_secs(30);

/// This side's identity of its arbiter. The primary asks for it before it greets, so that a primary that cannot begin
/// sends nothing to the standby.
pub(super) fn found(claims: &dyn Claims) -> Result<ArbiterIdentity, ContactError> {
    let found = threads::caught("Claims", || claims.arbiter()).map_err(|panic| panic.to_string());
    found.and_then(|found| found).map_err(ContactError::Arbiter)
}

/// The primary's part of the comparison.
pub(super) fn compare_first(
    link: &Link,
    ours: &ArbiterIdentity,
    claims: &dyn Claims,
) -> Result<(), ContactError> {
    link.send_arbiter(ours)?;
    let theirs = link.read_arbiter(WORD_LIMIT);
    claims.arbiters_compared();
    check(ours, &theirs?)
}

/// The standby's part of the comparison. It asks its arbiter after the primary has, and so finds the primary's token
/// if both use one store.
pub(super) fn compare_second(link: &Link, claims: &dyn Claims) -> Result<(), ContactError> {
    let theirs = link.read_arbiter(WORD_LIMIT)?;
    let ours = match found(claims) {
        Ok(ours) => ours,
        Err(error) => {
            let store = ArbiterStore::OutOfReach(shortened(error.to_string()));
            link.send_arbiter(&ArbiterIdentity { store, ..ArbiterIdentity::default() })?;
            return Err(error);
        }
    };
    link.send_arbiter(&ours)?;
    check(&theirs, &ours)
}

fn check(primary: &ArbiterIdentity, standby: &ArbiterIdentity) -> Result<(), ContactError> {
    if primary.is_same(standby) {
        return Ok(());
    }
    let why = match (&primary.store, &standby.store) {
        (_, ArbiterStore::OutOfReach(why)) => {
            return Err(ContactError::Arbiter(format!("the standby cannot ask its arbiter: {why}")));
        }
        (ArbiterStore::Token(_), ArbiterStore::Token(_)) => {
            "the standby does not find there what the primary has written, so they do not share it"
        }
        (ArbiterStore::Nothing, ArbiterStore::Nothing) => {
            "whether they are one cannot be proved, so their names have to be equal"
        }
        _ => "they are of two kinds",
    };
    let name =
        |of: &ArbiterIdentity| if of.name.is_empty() { "not named".to_owned() } else { of.name.clone() };
    Err(ContactError::TwoArbiters { primary: name(primary), standby: name(standby), why })
}

/// The text without NUL bytes, cut to the length that the wire allows.
fn shortened(mut text: String) -> String {
    text.retain(|character| character != '\0');
    while text.len() > ArbiterIdentity::MOST_TOKEN_BYTES {
        text.pop();
    }
    text
}
