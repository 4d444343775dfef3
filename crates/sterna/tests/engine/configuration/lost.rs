//! Connections that are lost before, during and after the making of the machine.

use std::sync::Arc;
use std::time::Duration;

use sterna::{Event, Parameters, Status};

use super::{Host, assert_arrives, failed, not_arrived, own, source};
use crate::common::{Log, multifd};
use crate::support::proxy::{Line, Proxy, Verdict, Way};
use crate::support::{small, vm};

/// What a piece must contain to be the last that passes.
fn cut_at(way: Way, word: &'static [u8], including: bool) -> crate::support::proxy::Filter {
    let mut is_cut = false;
    Box::new(move |line, going, _, piece| {
        let found = piece.windows(word.len()).position(|window| window == word);
        let Some(at) = found.filter(|_| !is_cut && line == Line::Main && going == way) else {
            return Verdict::Pass;
        };
        is_cut = true;
        piece.truncate(if including { piece.len() } else { at });
        Verdict::CutSettled
    })
}

const ASKED: &[u8] = b"\x53\x54\x4e\x11";

#[test]
fn connection_lost_before_the_configuration_has_arrived_leaves_the_destination_waiting() {
    let (source, host) = (source(&small()), Arc::new(Host::default()));
    let incoming = host.wait();
    // Inside the section, and before the PING after it.
    for word in [&b"sterna/configuration"[..], b"ram.high", ASKED] {
        let proxy = Proxy::new(&incoming.address(), cut_at(Way::Forward, word, false));
        let (params, capabilities) = multifd(2);
        let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::new(()));
        failed(&migration, &source);
        assert_eq!((incoming.status(), host.calls()), (Status::Setup, 0), "{word:?}");
    }
    let (params, capabilities) = multifd(2);
    let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
    assert_arrives(&migration, &incoming, &host);
}

#[test]
fn connection_lost_after_the_machine_is_made_ends_the_migration_at_both_sides() {
    // The answer, and the header with which the stream begins again.
    for (way, word) in [(Way::Back, ASKED), (Way::Forward, b"sterna/handover")] {
        let (source, host) = (source(&small()), Arc::new(Host::default()));
        let incoming = host.wait();
        let proxy = Proxy::new(&incoming.address(), cut_at(way, word, false));
        let (params, capabilities) = own();
        let migration = vm::start(&source, &proxy.address(), &params, capabilities, Arc::new(()));
        failed(&migration, &source);
        not_arrived(&incoming);
        assert_eq!((incoming.status(), host.calls()), (Status::Failed, 1), "{way:?}");
        assert!(!host.vm().guest.has_guest());
    }
}

#[test]
fn session_that_replaces_a_lost_one_makes_no_second_machine() {
    let config =
        sterna_guests::process::ProcessConfig { fill: sterna_guests::model::Fill::Random(3), ..small() };
    let (source, host) = (source(&config), Arc::new(Host::default()));
    let incoming = host.wait();
    let (mut passed, mut left) = (0, 2);
    let proxy = Proxy::new(
        &incoming.address(),
        Box::new(move |_, way, _, piece| {
            if way == Way::Forward {
                passed += piece.len();
            }
            if left > 0 && passed > 1 << 20 {
                (passed, left) = (0, left - 1);
                return Verdict::Cut;
            }
            Verdict::Pass
        }),
    );
    let (params, capabilities) = multifd(2);
    let params = Parameters { reconnect_window: Duration::from_secs(60), ..params };
    let told = Arc::new(Log::default());
    let migration = vm::start(&source, &proxy.address(), &params, capabilities, told.clone());
    assert_arrives(&migration, &incoming, &host);
    let again = told.events().iter().filter(|event| matches!(event, Event::Reconnected { .. })).count();
    assert_eq!(again, 2);
    assert_eq!(source.configured.load(std::sync::atomic::Ordering::SeqCst), 1);
}
