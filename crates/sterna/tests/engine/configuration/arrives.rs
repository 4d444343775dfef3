//! Guests that arrive in a machine that was made for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna::ram::missing_pages::MissingPages;
use sterna::{
    Address, Arrival, Capabilities, Compression, Incoming, MigrationMode, Parameters, RunState,
    SharedSettings, Tls, TlsCredentials, TlsEndpoint,
};
use sterna_guests::process::ProcessConfig;

use super::{Host, as_source, assert_arrives, own, source, start, written};
use crate::certificates::good_directory;
use crate::common::{multifd, parameters};
use crate::support::{small, vm, vms};

/// A machine of another form than the tests' usual one, so that only the configuration can have told it.
fn unusual() -> ProcessConfig {
    let blocks = [("ram.a", 1), ("ram.b", 2), ("ram.c", 3)];
    let blocks = blocks.map(|(name, mib)| (name.to_owned(), mib << 20)).to_vec();
    ProcessConfig { blocks, ..small() }
}

fn arrives(settings: &(Parameters, Capabilities), at: &str) -> Incoming {
    let (source, host) = (source(&unusual()), Arc::new(Host::default()));
    let incoming = host.wait_at(at, own(), as_source());
    assert!(incoming.settings().is_none(), "before a source has come");
    let migration = start(&source, &incoming, settings);
    assert_arrives(&migration, &incoming, &host);
    assert_eq!(*host.thread.lock().unwrap(), "configure");
    assert_eq!(source.configured.load(Ordering::SeqCst), 1);
    incoming
}

#[test]
fn guest_arrives_in_a_machine_made_from_its_configuration() {
    arrives(&own(), super::LOOPBACK);
}

#[test]
fn source_settings_are_taken_over() {
    for channels in [1, 2, 16] {
        let (mut params, capabilities) = multifd(channels);
        params.multifd_compression = Compression::Zstd;
        params.downtime_limit = Duration::from_secs(10);
        params.reconnect_window = Duration::from_secs(7);
        let incoming = arrives(&(params, capabilities), super::LOOPBACK);
        let (params, capabilities) = incoming.settings().expect("known");
        assert!(capabilities.multifd);
        assert_eq!((params.multifd_channels, params.multifd_compression), (channels, Compression::Zstd));
        assert_eq!(params.reconnect_window, Duration::from_secs(7));
    }
}

#[test]
fn destination_with_an_event_loop_waits_for_the_machine_that_is_made_later() {
    let (source, host) = (source(&unusual()), Arc::new(Host::default()));
    let incoming = host.wait_at(super::LOOPBACK, own(), as_source());
    let events = incoming.event_fd().unwrap();
    assert!(incoming.wait_timeout(Duration::from_millis(1)).is_none(), "before a source has come");
    let (waiting, news) = (
        incoming.clone(),
        std::thread::spawn(move || {
            let mut seen = 0;
            while seen < 2 {
                let mut ready = [rustix::event::PollFd::new(&events, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut ready, None).unwrap();
                seen += events.clear().unwrap();
            }
        }),
    );
    let waits = std::thread::spawn(move || waiting.wait_timeout(Duration::from_secs(3600)));

    let migration = start(&source, &incoming, &own());
    assert_arrives(&migration, &incoming, &host);

    assert!(matches!(waits.join().unwrap(), Some(Arrival::Completed(_))));
    news.join().unwrap();
    assert!(matches!(incoming.settle(Duration::ZERO), Arrival::Completed(_)));
}

#[test]
fn unix_socket_carries_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    arrives(&multifd(2), &format!("unix:{}/socket", directory.path().display()));
}

#[test]
fn connected_socket_carries_the_configuration() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let handed = |socket: std::os::unix::net::UnixStream| {
        Address::Handed(sterna::HandedFd::new(socket.into(), "socket"))
    };
    let (source, host) = (source(&unusual()), Arc::new(Host::default()));
    let (params, capabilities) = own();
    let making = Arc::clone(&host);
    let make = move |configuration: &[u8]| making.make(configuration);
    let observer = host.told.clone();
    let at = handed(theirs);
    let incoming =
        Incoming::listen_with(&at, params.clone(), capabilities, as_source(), observer, make).unwrap();
    let migration = vm::start(&source, &handed(ours), &params, capabilities, Arc::new(()));
    assert_arrives(&migration, &incoming, &host);
}

#[test]
fn authenticated_source_is_asked_over_tls() {
    let directory = good_directory();
    let tls = |endpoint| {
        let credentials = TlsCredentials::from_directory(directory.path(), endpoint, true).unwrap();
        Some(Tls::new(Arc::new(credentials)))
    };
    let (source, host) = (source(&unusual()), Arc::new(Host::default()));
    let there = Parameters { tls: tls(TlsEndpoint::Server), ..parameters() };
    let incoming = host.wait_at(super::LOOPBACK, (there, Capabilities::default()), as_source());

    // Without a certificate no configuration is read.
    let migration = start(&source, &incoming, &own());
    super::failed(&migration, &source);
    assert_eq!((host.calls(), source.configured.load(Ordering::SeqCst)), (0, 0));

    let (params, capabilities) = multifd(4);
    let here = (Parameters { tls: tls(TlsEndpoint::Client), ..params }, capabilities);
    let migration = start(&source, &incoming, &here);
    assert_arrives(&migration, &incoming, &host);
}

#[test]
fn paused_guest_stays_paused_and_an_operator_may_keep_a_running_one_paused() {
    for keeps in [false, true] {
        let (source, host) = (source(&unusual()), Arc::new(Host::default()));
        let incoming = host.wait();
        if keeps {
            // Before the VM exists.
            assert!(incoming.set_autostart(false));
        } else {
            source.guest.pause().unwrap();
        }
        let migration = start(&source, &incoming, &own());
        migration.wait();
        let arrival = incoming.wait();
        assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
        assert!(host.vm().guest.check().unwrap().is_consistent());
    }
}

#[test]
fn equal_settings_are_enough_without_taking_any_over() {
    let settings = multifd(3);
    let (source, host) = (source(&unusual()), Arc::new(Host::default()));
    let incoming = host.wait_at(super::LOOPBACK, settings.clone(), SharedSettings::AsHere);
    let migration = start(&source, &incoming, &settings);
    assert_arrives(&migration, &incoming, &host);
}

#[test]
fn destination_that_has_its_vm_does_not_ask() {
    let (source, target) = vms();
    *source.configuration.lock().unwrap() = Some(written(&small()));
    let incoming = vm::listen(&target, &parameters(), Capabilities::default());
    let migration = start(&source, &incoming, &own());
    crate::common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    assert_eq!(source.configured.load(Ordering::SeqCst), 0);
}

#[test]
#[allow(clippy::print_stdout, reason = "says why it is skipped")]
fn guest_that_is_switched_to_postcopy_runs_in_the_machine_made_for_it() {
    if let Err(error) = MissingPages::probe() {
        println!("SKIPPED guest_that_is_switched_to_postcopy_runs_in_the_machine_made_for_it: {error}");
        return;
    }
    let (source, host) = (source(&unusual()), Arc::new(Host::default()));
    let incoming = host.wait();
    let (params, capabilities) = multifd(2);
    let capabilities = Capabilities { postcopy_ram: true, postcopy_preempt: true, ..capabilities };
    let slow = Parameters { max_bandwidth_bytes: 1 << 20, ..params };
    let migration = start(&source, &incoming, &(slow, capabilities));
    crate::support::eventually("pages", || migration.statistics().rounds_begun > 0);
    migration.start_postcopy().unwrap();
    assert_arrives(&migration, &incoming, &host);
    assert!(migration.statistics().postcopy.is_some());
}

#[test]
fn machine_made_for_it_maps_the_memory_of_a_guest_of_this_host() {
    let directory = tempfile::tempdir().unwrap();
    let config = ProcessConfig { backing: sterna::ram::Backing::Memfd, ..unusual() };
    let (source, host) = (source(&config), Arc::new(Host::default()));
    let incoming = host.wait_at(&format!("unix:{}/socket", directory.path().display()), own(), as_source());
    let params = Parameters { mode: MigrationMode::CprTransfer, ..parameters() };
    let migration = start(&source, &incoming, &(params, Capabilities::default()));
    assert_arrives(&migration, &incoming, &host);
}

/// Connections of the second migration may reach the destination before its machine is made.
#[test]
fn guest_arrives_after_a_cancelled_migration() {
    for _ in 0..10 {
        let source = source(&unusual());
        let (first, host) = (Arc::new(Host::default()), Arc::new(Host::default()));
        let settings = multifd(4);
        let incoming = first.wait();
        // It waits for its operator before the switchover, so it cannot complete before it is cancelled.
        let (params, capabilities) = settings.clone();
        let waiting = (params, Capabilities { pause_before_switchover: true, ..capabilities });
        let cancelled = start(&source, &incoming, &waiting);
        super::eventually("the first machine is made", || first.calls() == 1);
        cancelled.cancel().unwrap();
        assert!(matches!(cancelled.wait(), super::Outcome::Cancelled));
        let incoming = host.wait();

        let migration = start(&source, &incoming, &settings);

        assert_arrives(&migration, &incoming, &host);
    }
}
