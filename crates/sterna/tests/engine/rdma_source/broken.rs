//! After every kind of failure, the guest continues to run at the source, and no resource of the migration is left.

use super::destination::{Moment, Trouble};
use super::*;
use crate::support::cause;
use sterna_transport::rdma::double::{Fault, Trigger};
use sterna_transport::rdma::{CompletionStatus, RdmaError};

const MOMENTS: [Moment; 10] = [
    Moment::Request,
    Moment::Accepted,
    Moment::Ping,
    Moment::Blocks,
    Moment::Register,
    Moment::Clear,
    Moment::PhaseOver(1),
    Moment::PhaseOver(2),
    Moment::Switchover,
    Moment::PhaseOver(3),
];

fn short_waits(lab: &Lab) -> Parameters {
    let mut params = lab.parameters(ChunkSize::LEAST);
    params.limits.setup = Duration::from_secs(2);
    params.limits.stall = Duration::from_millis(700);
    params.limits.switchover = Duration::from_secs(2);
    params.limits.prepare = Duration::from_secs(2);
    params
}

/// Asserts that the guest is here and can be migrated again.
fn assert_next_works(lab: &Lab, guest: &Arc<Plain>) {
    lab.assert_empty();
    let (outcome, ..) = migrate(lab, guest, manner(Kind::Qemu, 1), lab.parameters(ChunkSize::LEAST), false);
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    lab.assert_empty();
}

#[test]
fn destination_that_leaves_fails_or_sleeps_at_any_moment_costs_nothing() {
    for trouble in [Trouble::Leaves, Trouble::Fails, Trouble::Sleeps] {
        for (seed, moment) in MOMENTS.into_iter().enumerate() {
            // A destination that sleeps costs the time of the limit.
            if trouble == Trouble::Sleeps && seed % 3 != 0 {
                continue;
            }
            println!("{trouble:?} at {moment:?}");
            let lab = Lab::new(Settings::seeded(seed as u64));
            let guest = guest(&mut fastrand::Rng::with_seed(seed as u64));
            let manner = Manner { trouble: Some((moment, trouble)), ..manner(Kind::Qemu, 1) };

            let (outcome, ..) = migrate(&lab, &guest, manner, short_waits(&lab), false);

            assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
            assert_next_works(&lab, &guest);
        }
    }
}

#[test]
fn cancel_at_any_moment_leaves_nothing() {
    for (seed, moment) in MOMENTS.into_iter().enumerate() {
        println!("cancelled after {moment:?}");
        let lab = Lab::new(Settings::seeded(seed as u64));
        let guest = guest(&mut fastrand::Rng::with_seed(seed as u64));
        let manner = Manner { trouble: Some((moment, Trouble::Sleeps)), ..manner(Kind::Sterna, 1) };
        let destination = Destination::listen(&lab.destination, ram(None), manner);
        let migration =
            start(&guest, &destination, lab.parameters(ChunkSize::LEAST), Capabilities::default()).unwrap();

        // The destination sleeps from that moment on. The moment has been reached, or nearly.
        std::thread::sleep(Duration::from_millis(50 + 20 * seed as u64));
        migration.cancel().unwrap();

        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
        destination.wait();
        assert_next_works(&lab, &guest);
    }
}

#[test]
fn request_that_fails_with_any_status_ends_the_migration_and_nothing_else() {
    use CompletionStatus::*;
    let statuses = [RemoteAccess, RemoteInvalidRequest, RemoteOperation, RetryExceeded, LocalProtection];
    for (index, status) in statuses.into_iter().enumerate() {
        for request in [1, 5, 14, 30] {
            println!("{status:?} in place of request {request}");
            let lab = Lab::new(Settings::seeded(index as u64));
            let guest = guest(&mut fastrand::Rng::with_seed(request));
            lab.network.plan(&lab.source, Trigger::Request(request), Fault::Status(status));

            let (outcome, ..) = migrate(&lab, &guest, manner(Kind::Qemu, 1), short_waits(&lab), false);

            assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
            assert_next_works(&lab, &guest);
        }
    }
}

#[test]
fn registration_that_is_refused_is_an_error_of_this_side() {
    // The buffers of both connections need four, and each of the two large blocks has at least one window.
    for number in [1, 3, 4, 5, 6] {
        let lab = Lab::new(Settings::new());
        let guest = guest(&mut fastrand::Rng::with_seed(number));
        lab.network.plan(&lab.source, Trigger::Registration(number), Fault::Errno(12));

        let target = Destination::listen(&lab.destination, ram(None), manner(Kind::Qemu, 1));
        let migration = start(&guest, &target, short_waits(&lab), Capabilities::default()).unwrap();

        let outcome = migration.wait();
        let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
        assert_eq!(error.fault(), Some(sterna_wire::Fault::Local), "registration {number}: {error}");
        assert!(matches!(cause(&error), Some(RdmaError::Registration { .. })), "{error}");
        lab.network.kill(&lab.destination);
        target.wait();
        assert_eq!(lab.network.leaks(), Vec::<String>::new());
    }
}
