//! Which course a migration has.

use std::sync::Arc;

use super::handover::Handover;
use super::interface::Course;
use crate::outgoing::checkpoints::seeding;
use crate::outgoing::shared::Shared;

/// The course of `shared`'s migration.
pub(in crate::outgoing) fn course_of(shared: &Arc<Shared>) -> Box<dyn Course> {
    let shared = Arc::clone(shared);
    match shared.protecting.clone() {
        Some(protecting) => seeding::course(shared, protecting),
        None => Box::new(Handover { shared }),
    }
}
