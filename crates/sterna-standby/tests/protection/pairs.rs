//! A standby, with all features that it can be combined with.

use std::sync::Arc;
use std::time::Instant;

use sterna::{
    Address, Capabilities, Compression, MigrationMode, SettingsError, SourceVm, StartError, TargetVm,
    TlsEndpoint, ZeroPageDetection,
};
use sterna_guests::process::ProcessGuest;
use sterna_standby::NoOutput;
use sterna_standby::machines::{primary, standby};
use sterna_standby::{Primary, ProtectError, VmSurvivor};

use crate::common;
use crate::protected::{Arbiter, PATIENCE, PLAIN, TERMS, Way, guardians, stand_by};
use crate::support::pairs::{kinds, machines, throttled, with_tls};
use crate::support::{TestVm, small};

/// Checkpoints in each case.
const HELD: u64 = 5;

#[test]
fn protection_with_everything_that_goes_with_it() {
    let certificates = crate::certificates::good_directory();
    let ways = [
        (Compression::Zstd, ZeroPageDetection::Legacy),
        (Compression::Zlib, ZeroPageDetection::None),
        (Compression::None, ZeroPageDetection::Multifd),
    ];
    for config in kinds() {
        for ((compression, zero_pages), capabilities) in
            ways.into_iter().flat_map(|way| throttled(Capabilities::default()).map(|on| (way, on)))
        {
            let way = Way { lanes: 2, compression, zero_pages, delta: true, ..PLAIN };
            let (params, on) = way.settings();
            let Capabilities { auto_converge, dirty_limit, .. } = capabilities;
            let on = Capabilities { auto_converge, dirty_limit, switchover_ack: true, ..on };
            let Some([source, target]) = machines(&config, false) else { continue };
            let arbiter = Arc::<Arbiter>::default();
            let survivor =
                VmSurvivor::new(Arc::clone(&target) as Arc<dyn TargetVm>).expect("the place is free");
            let theirs = with_tls(&params, certificates.path(), TlsEndpoint::Server);
            let standby = stand_by(survivor, theirs, on, &arbiter);
            let ours = with_tls(&params, certificates.path(), TlsEndpoint::Client);
            let guardians = guardians(&arbiter, 1, Arc::new(NoOutput));
            let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;
            let options = way.options(TERMS);
            let primary =
                Primary::protect(vm, &standby.address(), &options, guardians, ours, on, Arc::new(()))
                    .expect("protected");
            let begin = Instant::now();
            while primary.statistics().held < HELD {
                let state = primary.state();
                assert!(state.outcome.is_none() && begin.elapsed() < PATIENCE, "{way:?}: {state:?}");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }

            primary.hand_over().expect("protected");

            assert_eq!(primary.wait(), primary::Outcome::HandedOver, "{way:?}: {:?}", primary.state());
            let ended = standby.contact().expect("a contact").wait(PATIENCE).expect("an end");
            assert!(matches!(ended, standby::Outcome::Running(_)), "{way:?}: {ended:?}");
            let (before, after) = (source.guest.progress(), target.guest.progress());
            assert!(after.total_steps() >= before.total_steps(), "no step is lost");
            common::assert_lives_on(&target.guest);
            assert!(primary.migration().statistics().free_pages > 0, "the guest was asked");
        }
    }
}

#[test]
fn standby_of_a_guest_whose_memory_is_handed_over_is_refused() {
    let guest = ProcessGuest::boot(small()).unwrap();
    guest.cont().unwrap();
    let vm: Arc<dyn SourceVm> = TestVm::new(Arc::clone(&guest));
    let (mut params, on) = PLAIN.settings();
    params.mode = MigrationMode::CprTransfer;
    let at = Address::Unix("/nowhere".into());
    let guardians = guardians(&Arc::default(), 1, Arc::new(NoOutput));

    let refused = Primary::protect(vm, &at, &PLAIN.options(TERMS), guardians, params, on, Arc::new(()));

    let refused = refused.err().expect("it is refused");
    let ProtectError::Start(StartError::Settings(SettingsError::CprExcludes { what })) = refused else {
        panic!("{refused}")
    };
    assert_eq!(what, "a standby (x-colo)");
    common::assert_lives_on(&guest);
}
