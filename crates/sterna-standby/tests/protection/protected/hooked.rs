//! The VMM's hook runs first on the threads of a protection, at both sides.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::{OnThreadStart, Parameters, SourceVm, TargetVm, ThreadRole};
use sterna_guests::process::ProcessGuest;
use sterna_standby::machines::{primary, standby};
use sterna_standby::{NoOutput, Primary, VmSurvivor};

use super::link::Link;
use super::{Arbiter, PLAIN, Pair, TERMS, Way, guardians, stand_by, writer};
use crate::common::{assert_lives_on, pair};

type Roles = Arc<Mutex<BTreeSet<ThreadRole>>>;

fn hooked(params: &Parameters) -> (Parameters, Roles) {
    let roles = Roles::default();
    let theirs = Arc::clone(&roles);
    let hook: OnThreadStart = Arc::new(move |role| {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        assert!(name.starts_with(role.name()), "{name}, {role}");
        theirs.lock().insert(role);
    });
    (Parameters { on_thread_start: Some(hook), ..params.clone() }, roles)
}

#[test]
fn threads_of_a_protection_run_the_hook_of_their_side() {
    let way = Way { lanes: 2, ..PLAIN };
    let (params, capabilities) = way.settings();
    let ((ours, here), (theirs, there_roles)) = (hooked(&params), hooked(&params));
    let (guest, _) = pair(&writer());
    let there = ProcessGuest::waiting(writer()).expect("destination");
    let arbiter = Arc::<Arbiter>::default();
    let waiting: Arc<dyn TargetVm> = there.clone();
    let survivor = VmSurvivor::new(waiting).expect("the place is free");
    let standby = stand_by(survivor, theirs, capabilities, &arbiter);
    let link = Link::new(&standby.address());
    let guardians = guardians(&arbiter, 1, Arc::new(NoOutput));
    let options = way.options(TERMS);
    let vm: Arc<dyn SourceVm> = guest.clone();
    let primary =
        Primary::protect(vm, &link.address(), &options, guardians, ours, capabilities, Arc::new(()))
            .expect("protected");
    let said_again = Arc::default();
    let pair = Pair { guest, there, primary, standby, arbiter, link, said_again };
    pair.wait_for_held(3);
    pair.primary.hand_over().expect("protected");
    assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver);
    assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
    assert_lives_on(&pair.there);

    use ThreadRole as R;
    let at_primary = [
        R::Migration,
        R::Lane,
        R::ReturnPath,
        R::Protection,
        R::ProtectionAnswers,
        R::ProtectionEnd,
        R::SeedingEnd,
    ];
    let at_standby =
        [R::Incoming, R::Listener, R::Greeter, R::Lane, R::Standby, R::Heartbeats, R::ProtectionStep];
    for (roles, expected) in [(here, &at_primary[..]), (there_roles, &at_standby[..])] {
        let ran = roles.lock();
        let missing: Vec<_> = expected.iter().filter(|role| !ran.contains(role)).collect();
        assert!(missing.is_empty(), "{missing:?} did not run; {ran:?} did");
    }
}
